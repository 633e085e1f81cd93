// Patterns of Oniguruma, which tokenizers are written in, as patterns of PCRE2.
#pragma once

#include <string>
#include <string_view>

namespace moiety::data::bpe {

// The pattern for PCRE2 (with UTF, UCP and multi-line `^` and `$`) that matches what `oniguruma`
// matches in Ruby's syntax and with Unicode 16. `place` is its JSON path, for errors. Throws
// Error(kUnsupported) for what it does not know to mean the same in both.
std::string pcre_pattern(std::string_view oniguruma, const std::string& place);

// The pattern that matches `text` and nothing else.
std::string literal_pattern(std::string_view text);

}  // namespace moiety::data::bpe
