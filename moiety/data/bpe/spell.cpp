// The alphabet of ByteLevel: a printable byte of Latin-1 is itself, the others are U+0100 and what
// follows, in their order.
#include <array>
#include <utility>

#include "moiety/data/bpe/code_points.h"
#include "moiety/data/bpe/spec.h"

namespace moiety::data::bpe {
namespace {

constexpr char32_t kFirstOther = 0x100;
constexpr size_t kOthers = 68;

struct Alphabet {
  std::array<char32_t, 256> letters{};
  std::array<char, kOthers> others{};
};

constexpr bool is_itself(unsigned byte) {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

constexpr Alphabet make_alphabet() {
  Alphabet a;
  size_t others = 0;
  for (unsigned byte = 0; byte < 256; ++byte) {
    a.letters[byte] = is_itself(byte) ? char32_t{byte} : kFirstOther + char32_t(others);
    if (!is_itself(byte)) a.others[others++] = static_cast<char>(byte);
  }
  return a;
}

constexpr Alphabet kAlphabet = make_alphabet();

}  // namespace

std::string spell_bytes(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) append_utf8(out, kAlphabet.letters[static_cast<unsigned char>(c)]);
  return out;
}

std::optional<std::string> unspell_bytes(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size(); at = next_character(text, at)) {
    const char32_t c = code_point(text.substr(at));
    if (c < kFirstOther && is_itself(unsigned(c))) {
      out += static_cast<char>(c);
    } else if (c >= kFirstOther && c < kFirstOther + kOthers) {
      out += kAlphabet.others[c - kFirstOther];
    } else {
      return std::nullopt;
    }
  }
  return out;
}

}  // namespace moiety::data::bpe
