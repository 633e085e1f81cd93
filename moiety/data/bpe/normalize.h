// Normalizers: what is done to a text before it is split.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "moiety/data/bpe/regex.h"
#include "moiety/data/bpe/spec.h"

namespace moiety::data::bpe {

// A normalizer with its patterns compiled; for several threads.
class Normalizer {
 public:
  explicit Normalizer(const std::vector<NormalStep>& steps);
  bool empty() const { return steps_.empty(); }

  // The part of it that belongs to one thread.
  class Run {
   public:
    explicit Run(const Normalizer& normalizer);
    // Changes a text that is UTF-8 and not empty.
    void operator()(std::string& text);

   private:
    const Normalizer& normalizer_;
    std::vector<Matcher> matchers_;  // of the replacements, in order
  };

 private:
  struct Replacement {
    Pattern pattern;
    std::string content;
  };
  std::vector<std::variant<Nfc, Prepend, Replacement>> steps_;
};

// Replaces every match by `content`.
void replace_all(std::string& text, Matcher& matcher, std::string_view content);

// The library's version, and that of its Unicode; empty in a build without it.
std::string nfc_library();
// Throws Error(kUnsupported) in a build without utf8proc.
void require_nfc(const std::string& place);
// The text in the normal form C, as the `tokenizers` package has it.
std::string to_nfc(std::string_view text);

}  // namespace moiety::data::bpe
