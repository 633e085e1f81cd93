#include "moiety/base/printable.h"

#include "moiety/base/format.h"

namespace moiety {
namespace {

std::string escaped(std::string_view s) {
  std::string out;
  for (const char c : s) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (byte < 32 || byte == 127) {
      out += text("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

bool continues_character(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

}  // namespace

std::string printable(std::string_view s, size_t most) {
  if (s.size() <= most) return escaped(s);
  size_t head = most * 3 / 4, tail = s.size() - (most - head);
  while (head > 0 && continues_character(s[head])) --head;
  while (tail < s.size() && continues_character(s[tail])) ++tail;
  return escaped(s.substr(0, head)) + text("...({} bytes)...", tail - head) +
         escaped(s.substr(tail));
}

std::string parser_text(std::string_view what) {
  const size_t end = what.starts_with('[') ? what.find("] ") : what.npos;
  return printable(end == what.npos ? what : what.substr(end + 2));
}

}  // namespace moiety
