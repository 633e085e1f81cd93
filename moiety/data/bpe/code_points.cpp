#include "moiety/data/bpe/code_points.h"

#include <algorithm>

namespace moiety::data::bpe {
namespace {

struct YoungClass {
  std::string_view name;
  std::span<const CodePoints> members;
};

#include "moiety/data/bpe/code_points.inc"

}  // namespace

char32_t code_point(std::string_view c) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(c[i]); };
  switch (character_bytes(c[0])) {
    case 1:
      return byte(0);
    case 2:
      return (byte(0) & 0x1fu) << 6 | (byte(1) & 0x3fu);
    case 3:
      return (byte(0) & 0xfu) << 12 | (byte(1) & 0x3fu) << 6 | (byte(2) & 0x3fu);
    default:
      return (byte(0) & 7u) << 18 | (byte(1) & 0x3fu) << 12 | (byte(2) & 0x3fu) << 6 |
             (byte(3) & 0x3fu);
  }
}

void append_utf8(std::string& text, char32_t c) {
  const auto add = [&](char32_t byte) { text += static_cast<char>(byte); };
  const auto tail = [&](int shift) { add(0x80 | (c >> shift & 0x3f)); };
  if (c < 0x80) return add(c);
  if (c < 0x800) return add(0xc0 | c >> 6), tail(0);
  if (c < 0x10000) return add(0xe0 | c >> 12), tail(6), tail(0);
  add(0xf0 | c >> 18), tail(12), tail(6), tail(0);
}

bool contains(std::span<const CodePoints> set, char32_t c) {
  const auto behind =
      std::upper_bound(set.begin(), set.end(), c,
                       [](char32_t value, const CodePoints& range) { return value < range.first; });
  return behind != set.begin() && c <= std::prev(behind)->last;
}

std::span<const CodePoints> young(std::string_view name) {
  for (const YoungClass& y : kYoungClasses) {
    if (y.name == name) return y.members;
  }
  return {};
}

std::span<const CodePoints> more_of_words() { return kMoreOfWords; }
std::span<const CodePoints> punctuation() { return kPunctuation; }
std::span<const CodePoints> digits() { return kDigits; }
std::span<const CodePoints> apart_in_nfc() { return kApartInNfc; }

}  // namespace moiety::data::bpe
