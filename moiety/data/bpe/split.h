// Pre-tokenizers: a text becomes words, each of which the model encodes by itself.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "moiety/data/bpe/regex.h"
#include "moiety/data/bpe/spec.h"

namespace moiety::data::bpe {

// Pre-tokenizers with their patterns compiled; for several threads.
class Splitter {
 public:
  explicit Splitter(const std::vector<SplitStep>& steps, const std::string& file);

  // The part of it that belongs to one thread.
  class Run {
   public:
    explicit Run(const Splitter& splitter);
    // The words of `text`, none of them empty; good until the next call. `is_start`: the text
    // begins where the whole text does.
    const std::vector<std::string_view>& operator()(std::string_view text, bool is_start);

   private:
    using Words = std::vector<std::string_view>;
    void apply(const Split& step, Matcher& matcher);
    void apply(const ByteLevel& step, Matcher* matcher);
    void apply(const Digits& step);
    void apply(const Punctuation& step);
    void apply(const Metaspace& step, bool is_start);
    template <class FindAll>
    void split_each(Behavior behavior, bool invert, const FindAll& find_all);

    const Splitter& splitter_;
    std::vector<Matcher> matchers_;  // one a step that has a pattern, in order
    Words words_, next_;
    std::deque<std::string> changed_;  // texts that words are parts of
  };

 private:
  std::vector<SplitStep> steps_;
  std::vector<Pattern> patterns_;
};

}  // namespace moiety::data::bpe
