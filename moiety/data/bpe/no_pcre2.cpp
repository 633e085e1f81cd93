#include "moiety/base/error.h"
#include "moiety/data/bpe/regex.h"

namespace moiety::data::bpe {

std::string regex_library() { return {}; }

struct Pattern::Code {};
struct Matcher::State {};

Pattern::Pattern(const Sought& sought) : text_(sought.text), place_(sought.place) {
  if (!sought.is_pattern) return;
  fail(ErrorKind::kUnsupported,
       "{}: a pattern needs a build with PCRE2 (Debian: libpcre2-dev; build anew)", place_);
}

Matcher::Matcher(const Pattern& pattern) : pattern_(pattern) {}
Matcher::Matcher(Matcher&&) noexcept = default;
Matcher::~Matcher() = default;

std::optional<Matcher::Range> Matcher::find(std::string_view text, size_t from) {
  const size_t at = text.find(pattern_.text_, from);
  if (at == text.npos) return std::nullopt;
  return Range{at, at + pattern_.text_.size()};
}

}  // namespace moiety::data::bpe
