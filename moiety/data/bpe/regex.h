// Patterns that are looked for in texts, by PCRE2.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "moiety/data/bpe/code_points.h"
#include "moiety/data/bpe/spec.h"

namespace moiety::data::bpe {

// What is looked for: a text, or a compiled pattern. For several threads.
class Pattern {
 public:
  // Throws Error(kUnsupported), with the place in the file, for a pattern that is not understood
  // and, in a build without PCRE2, for all of them. A text needs no PCRE2.
  explicit Pattern(const Sought& sought);

 private:
  friend class Matcher;
  struct Code;
  std::shared_ptr<const Code> code_;  // null: a text
  std::string text_, place_;
};

// The library's version, and that of its Unicode; empty in a build without it.
std::string regex_library();

// The search for a pattern, for one thread.
class Matcher {
 public:
  struct Range {
    size_t begin, end;
  };
  explicit Matcher(const Pattern& pattern);
  Matcher(Matcher&&) noexcept;
  ~Matcher();

  // The leftmost match in `text`, which is UTF-8, from byte `from` on, where a character begins.
  // Throws DataError if the pattern takes too many steps.
  std::optional<Range> find(std::string_view text, size_t from);

  // Calls `each` with all matches as tokenizers count them: without an empty one at the end of the
  // one before.
  template <class Each>
  void find_all(std::string_view text, Each&& each) {
    size_t last = std::string_view::npos;
    for (size_t from = 0; from <= text.size();) {
      const std::optional<Range> match = find(text, from);
      if (!match) return;
      if (match->begin == match->end && match->end == last) {
        from = next_character(text, from);
        continue;
      }
      from = last = match->end;
      each(*match);
    }
  }

 private:
  std::optional<Range> find_pattern(std::string_view text, size_t from);

  struct State;
  Pattern pattern_;
  std::unique_ptr<State> state_;
};

}  // namespace moiety::data::bpe
