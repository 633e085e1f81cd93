#include "moiety/base/error.h"
#include "moiety/data/bpe/normalize.h"

namespace moiety::data::bpe {

std::string nfc_library() { return {}; }

void require_nfc(const std::string& place) {
  fail(ErrorKind::kUnsupported,
       "{}: NFC needs a build with utf8proc (Debian: libutf8proc-dev; build anew)", place);
}

std::string to_nfc(std::string_view text) { return std::string(text); }

}  // namespace moiety::data::bpe
