#include "moiety/hf/key_list.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <vector>

#include "moiety/base/format.h"
#include "moiety/base/printable.h"

namespace moiety::hf {
namespace {

constexpr size_t kMostDigits = 9;   // of what counts as a number
constexpr size_t kMostShown = 500;  // of an entry

// A name in parts, by turns a text and a number in digits; it begins and ends with a text.
using Parts = std::vector<std::string>;

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

Parts parts_of(const std::string& name) {
  Parts parts{""};
  for (size_t i = 0; i < name.size();) {
    size_t end = i;
    while (end < name.size() && is_digit(name[end])) ++end;
    const size_t digits = end - i;
    // A number with leading zeros would not come back from its value.
    if (digits > 0 && digits <= kMostDigits && (digits == 1 || name[i] != '0')) {
      parts.push_back(name.substr(i, digits));
      parts.emplace_back();
      i = end;
      continue;
    }
    end = std::max(end, i + 1);
    parts.back() += name.substr(i, end - i);
    i = end;
  }
  return parts;
}

std::string range_text(const std::set<int64_t>& numbers) {
  std::string out;
  for (auto it = numbers.begin(); it != numbers.end();) {
    const int64_t first = *it;
    int64_t last = first;
    while (++it != numbers.end() && *it == last + 1) ++last;
    out += text("{}{}", out.empty() ? "" : ",", first);
    if (last > first) out += text("-{}", last);
  }
  return numbers.size() == 1 ? out : "{" + out + "}";
}

// Makes one of those that differ in the number at `at` alone.
std::set<Parts> fold(const std::set<Parts>& entries, size_t at) {
  std::map<Parts, std::set<int64_t>> numbers;
  for (Parts parts : entries) {
    const int64_t number = std::stoll(parts[at]);
    parts[at].clear();
    numbers[std::move(parts)].insert(number);
  }
  std::set<Parts> folded;
  for (const auto& [rest, list] : numbers) {
    Parts parts = rest;
    parts[at] = range_text(list);
    folded.insert(std::move(parts));
  }
  return folded;
}

std::string joined(const Parts& parts) {
  std::string out;
  for (const std::string& part : parts) out += part;
  return out;
}

}  // namespace

std::string key_list(const std::set<std::string>& names, size_t most) {
  std::map<size_t, std::set<Parts>> entries;  // by the number of parts
  for (const std::string& name : names) {
    Parts parts = parts_of(name);
    entries[parts.size()].insert(std::move(parts));
  }
  std::string out;
  size_t shown = 0, left = 0;
  for (auto& [size, list] : entries) {
    for (size_t at = size; at-- > 0;) {
      if (at % 2 == 1) list = fold(list, at);
    }
    for (const Parts& parts : list) {
      if (shown == most) {
        ++left;
        continue;
      }
      out += (shown++ ? ", " : "") + printable(joined(parts), kMostShown);
    }
  }
  return left ? text("{}, and {} more", out, left) : out;
}

}  // namespace moiety::hf
