// Code points: their UTF-8, and sets of them that the tables of code_points.inc hold.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace moiety::data::bpe {

// The code points from `first` to `last`.
struct CodePoints {
  char32_t first, last;
};

// The length of the character that begins with this byte, and its code point. The text is UTF-8.
inline size_t character_bytes(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  return byte < 0xc0 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}
char32_t code_point(std::string_view character);
// The position behind the character at `at`; one further at the end.
inline size_t next_character(std::string_view text, size_t at) {
  return at < text.size() ? at + character_bytes(text[at]) : at + 1;
}
void append_utf8(std::string& text, char32_t c);

bool contains(std::span<const CodePoints> set, char32_t c);

// The code points that a general category ("Lu") or a script ("Han") got with Unicode 15 to 16.
std::span<const CodePoints> young(std::string_view name);
std::span<const CodePoints> more_of_words();
std::span<const CodePoints> punctuation();
std::span<const CodePoints> digits();
// Those that NFC neither moves nor joins, although a library may.
std::span<const CodePoints> apart_in_nfc();

}  // namespace moiety::data::bpe
