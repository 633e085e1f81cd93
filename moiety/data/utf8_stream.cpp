#include "moiety/data/utf8_stream.h"

namespace moiety::data {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

struct Character {
  size_t bytes;     // that belong together
  bool is_whole;    // they are a character
  bool may_become;  // they are the beginning of one
};

// What stands at the beginning of a text that is not empty.
Character first_character(std::string_view s) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(s[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {1, true, false};
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4) return {1, false, false};
  // The second byte of some has a narrower range: overlong forms, surrogates, what is too large.
  const unsigned low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  size_t n = 1;
  while (n < length && n < s.size()) {
    const bool fits = n == 1 ? byte(1) >= low && byte(1) <= high : (byte(n) & 0xc0) == 0x80;
    if (!fits) return {n, false, false};
    ++n;
  }
  return {n, n == length, n < length};
}

}  // namespace

std::string Utf8Stream::add(std::string_view bytes) {
  held_ += bytes;
  std::string out;
  std::string_view left = held_;
  while (!left.empty()) {
    const Character c = first_character(left);
    if (c.may_become) break;
    out += c.is_whole ? left.substr(0, c.bytes) : kReplacement;
    left.remove_prefix(c.bytes);
  }
  held_.erase(0, held_.size() - left.size());
  return out;
}

std::string Utf8Stream::rest() {
  std::string out(held_.empty() ? "" : kReplacement);
  held_.clear();
  return out;
}

}  // namespace moiety::data
