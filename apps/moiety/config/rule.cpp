#include "apps/moiety/config/rule.h"

#include <algorithm>
#include <cmath>

#include "moiety/base/format.h"
#include "moiety/base/number_text.h"

namespace moiety::app {
namespace {

std::string join(const std::vector<std::string_view>& words) {
  std::string out;
  for (std::string_view word : words) {
    out += text("{}{}", out.empty() ? "" : " | ", word.empty() ? "\"\"" : word);
  }
  return out;
}

// A number of a range, which may belong to integers: 1e+18 as "1e18".
std::string number(double v) {
  if (std::floor(v) == v && std::fabs(v) < 1e15) return std::to_string(int64_t(v));
  const std::string s = number_text(v);
  const size_t e = s.find('e');
  if (e == s.npos) return s;
  return s.substr(0, e + 1) + (s[e + 1] == '-' ? "-" : "") +
         s.substr(s.find_first_not_of("+-0", e + 1));
}

}  // namespace

Rule Rule::or_zero() const {
  Rule rule = *this;
  rule.zero = true;
  return rule;
}
Rule Rule::or_none() const {
  Rule rule = *this;
  rule.none = true;
  return rule;
}
Rule Rule::multiple_of(int64_t m) const {
  Rule rule = *this;
  rule.multiple = m;
  return rule;
}
Rule Rule::without_min() const {
  Rule rule = *this;
  rule.open_min = true;
  return rule;
}
Rule Rule::without_max() const {
  Rule rule = *this;
  rule.open_max = true;
  return rule;
}

bool Rule::allows(double v) const {
  if (zero && v == 0) return true;
  if (!std::isfinite(v) || v < min || v > max) return false;
  return !(open_min && v == min) && !(open_max && v == max);
}

bool Rule::allows(std::string_view word) const {
  return choices.empty() || std::find(choices.begin(), choices.end(), word) != choices.end();
}

Rule any() { return {}; }
Rule between(double min, double max) {
  Rule rule;
  rule.min = min;
  rule.max = max;
  return rule;
}
Rule at_least(double min) { return between(min, Rule::kInfinity); }

std::string range_text(const Rule& rule) {
  if (!rule.choices.empty()) return join(rule.choices);
  std::string out = rule.none ? "\"\" or " : rule.zero ? "0 or " : "";
  const bool low = std::isfinite(rule.min), high = std::isfinite(rule.max);
  if (rule.multiple > 1 && rule.min == 0 && rule.max == double(rule.multiple)) {
    return out + "0 or " + number(rule.max);
  }
  if (low && high) {
    out += (rule.open_min ? ">" : "") + number(rule.min) + ".." + (rule.open_max ? "<" : "") +
           number(rule.max);
  } else if (low) {
    out += (rule.open_min ? "> " : ">= ") + number(rule.min);
  }
  if (rule.multiple > 1) out += ", a multiple of " + std::to_string(rule.multiple);
  return out;
}

}  // namespace moiety::app
