#include <cstdlib>
#include <utf8proc.h>

#include "moiety/base/error.h"
#include "moiety/data/bpe/normalize.h"

namespace moiety::data::bpe {
namespace {

// Below U+0300 nothing is moved or joined with what stands there too.
bool is_plain(std::string_view text) {
  for (size_t at = 0; at < text.size(); at = next_character(text, at)) {
    if (static_cast<unsigned char>(text[at]) >= 0xcc) return false;
  }
  return true;
}

void append_nfc(std::string& out, std::string_view text) {
  if (is_plain(text)) {
    out += text;
    return;
  }
  utf8proc_uint8_t* made = nullptr;
  const utf8proc_ssize_t bytes =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &made,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  if (bytes < 0) throw DataError("tokenizer: NFC of a text: {}", utf8proc_errmsg(bytes));
  out.append(reinterpret_cast<const char*>(made), static_cast<size_t>(bytes));
  std::free(made);
}

}  // namespace

void require_nfc(const std::string&) {}

std::string nfc_library() {
  return text("utf8proc {} of Unicode {}", utf8proc_version(), utf8proc_unicode_version());
}

std::string to_nfc(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = next_character(text, at);
    const bool may_be = static_cast<unsigned char>(text[at]) >= 0xdf;  // from U+07C0 on
    if (may_be && contains(apart_in_nfc(), code_point(text.substr(at)))) {
      append_nfc(out, text.substr(done, at - done));
      out += text.substr(at, end - at);
      done = end;
    }
    at = end;
  }
  append_nfc(out, text.substr(done));
  return out;
}

}  // namespace moiety::data::bpe
