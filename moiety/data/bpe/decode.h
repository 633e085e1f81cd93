// Decoders: tokens become text as they come.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "moiety/data/bpe/regex.h"
#include "moiety/data/bpe/spec.h"

namespace moiety::data::bpe {

// A decoder with its patterns compiled; for several threads.
class Decoder {
 public:
  explicit Decoder(const std::optional<std::vector<DecodeStep>>& steps);

  // The decoding of one text.
  class Run {
   public:
    explicit Run(const Decoder& decoder);
    // Adds the spelling of a token; appends the bytes that are certain now. What is held back at the
    // end of the text is what a decoder strips there.
    void add(std::string token, std::string& out);

   private:
    struct State {
      int64_t tokens = 0;
      int64_t stripped = 0;  // characters at the start of a fused text; -1: there are no more
      std::string held;      // characters at its end that may be stripped
    };
    void step(size_t i, std::string token, std::string& out);
    void strip(size_t i, const StripText& strip, std::string token, std::string& out);

    const Decoder& decoder_;
    std::vector<State> states_;
    std::vector<std::optional<Matcher>> matchers_;
    bool is_first_ = true;
  };

 private:
  struct Stage {
    DecodeStep step;
    std::optional<Pattern> pattern;
    bool is_fused = false;  // what it sees is parts of one text
  };
  bool spaced_;  // there is no decoder: spaces stand between tokens
  std::vector<Stage> stages_;
};

}  // namespace moiety::data::bpe
