#include "moiety/data/bpe/split.h"

#include "moiety/data/bpe/code_points.h"

namespace moiety::data::bpe {
namespace {

// How ByteLevel splits: GPT-2's pattern.
constexpr const char* kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// The parts of one text, matches and what is between them, by a behaviour.
class Parts {
 public:
  Parts(std::string_view text, Behavior behavior, bool invert, std::vector<std::string_view>& out)
      : text_(text), behavior_(behavior), invert_(invert), out_(out) {}

  void match(size_t begin, size_t end) {
    if (begin > done_) add(done_, begin, false);
    add(begin, end, true);
    done_ = end;
  }
  void finish() {
    if (done_ < text_.size()) add(done_, text_.size(), false);
    flush(text_.size());
  }

 private:
  void add(size_t begin, size_t end, bool matched) {
    const bool is_match = matched != invert_;
    switch (behavior_) {
      case Behavior::kIsolated:
        push(begin, end);
        break;
      case Behavior::kRemoved:
        if (!is_match) push(begin, end);
        break;
      // A part that a neighbour may join waits from `open_` on.
      case Behavior::kMergedWithPrevious:
        if (!is_match || was_match_ || !is_open_) open(begin);
        break;
      case Behavior::kMergedWithNext:
        if (!(is_open_ && was_match_ && !is_match)) open(begin);
        break;
      case Behavior::kContiguous:
        if (!is_open_ || is_match != was_match_) open(begin);
        break;
    }
    was_match_ = is_match;
  }
  void push(size_t begin, size_t end) {
    if (end > begin) out_.push_back(text_.substr(begin, end - begin));
  }
  void open(size_t begin) {
    flush(begin);
    open_ = begin;
    is_open_ = true;
  }
  void flush(size_t end) {
    if (is_open_) push(open_, end);
  }

  std::string_view text_;
  Behavior behavior_;
  bool invert_;
  std::vector<std::string_view>& out_;
  size_t done_ = 0, open_ = 0;
  bool is_open_ = false, was_match_ = false;
};

template <class Found>
void find_members(std::string_view text, std::span<const CodePoints> set, const Found& found) {
  for (size_t at = 0; at < text.size();) {
    const size_t end = next_character(text, at);
    if (contains(set, code_point(text.substr(at)))) found(at, end);
    at = end;
  }
}

}  // namespace

Splitter::Splitter(const std::vector<SplitStep>& steps, const std::string& file) : steps_(steps) {
  for (const SplitStep& step : steps_) {
    if (const auto* split = std::get_if<Split>(&step)) patterns_.emplace_back(split->sought);
    if (const auto* bytes = std::get_if<ByteLevel>(&step); bytes && bytes->use_regex) {
      patterns_.emplace_back(Sought{true, kByteLevelPattern, file + ": pre_tokenizer (ByteLevel)"});
    }
  }
}

Splitter::Run::Run(const Splitter& splitter) : splitter_(splitter) {
  for (const Pattern& pattern : splitter.patterns_) matchers_.emplace_back(pattern);
}

const std::vector<std::string_view>& Splitter::Run::operator()(std::string_view text,
                                                               bool is_start) {
  words_.assign(1, text);
  changed_.clear();
  auto matcher = matchers_.begin();
  for (const SplitStep& step : splitter_.steps_) {
    if (const auto* split = std::get_if<Split>(&step)) {
      apply(*split, *matcher++);
    } else if (const auto* bytes = std::get_if<ByteLevel>(&step)) {
      apply(*bytes, bytes->use_regex ? &*matcher++ : nullptr);
    } else if (const auto* digits = std::get_if<Digits>(&step)) {
      apply(*digits);
    } else if (const auto* punctuation = std::get_if<Punctuation>(&step)) {
      apply(*punctuation);
    } else {
      apply(std::get<Metaspace>(step), is_start);
    }
  }
  return words_;
}

// Splits every word at what `find_all(word, match)` finds.
template <class FindAll>
void Splitter::Run::split_each(Behavior behavior, bool invert, const FindAll& find_all) {
  next_.clear();
  for (const std::string_view word : words_) {
    Parts parts(word, behavior, invert, next_);
    find_all(word, [&](size_t begin, size_t end) { parts.match(begin, end); });
    parts.finish();
  }
  words_.swap(next_);
}

void Splitter::Run::apply(const Split& step, Matcher& matcher) {
  split_each(step.behavior, step.invert, [&](std::string_view word, const auto& match) {
    matcher.find_all(word, [&](Matcher::Range m) { match(m.begin, m.end); });
  });
}

void Splitter::Run::apply(const ByteLevel& step, Matcher* matcher) {
  if (step.add_prefix_space) {
    for (std::string_view& word : words_) {
      if (word.starts_with(' ')) continue;
      word = changed_.emplace_back(" " + std::string(word));
    }
  }
  if (!matcher) return;
  split_each(Behavior::kIsolated, false, [&](std::string_view word, const auto& match) {
    matcher->find_all(word, [&](Matcher::Range m) { match(m.begin, m.end); });
  });
}

void Splitter::Run::apply(const Digits& step) {
  const Behavior behavior = step.individual ? Behavior::kIsolated : Behavior::kContiguous;
  split_each(behavior, false,
             [](std::string_view word, const auto& match) { find_members(word, digits(), match); });
}

void Splitter::Run::apply(const Punctuation& step) {
  split_each(step.behavior, false, [](std::string_view word, const auto& match) {
    find_members(word, punctuation(), match);
  });
}

void Splitter::Run::apply(const Metaspace& step, bool is_start) {
  for (size_t i = 0; i < words_.size(); ++i) {
    std::string& word = changed_.emplace_back();
    for (const char c : words_[i]) c == ' ' ? void(word += step.mark) : void(word += c);
    const bool prepends = step.prepends == Metaspace::Prepends::kAlways ||
                          (step.prepends == Metaspace::Prepends::kFirst && is_start && i == 0);
    if (prepends && !word.starts_with(step.mark)) word.insert(0, step.mark);
    words_[i] = word;
  }
  if (!step.split) return;
  split_each(Behavior::kMergedWithNext, false, [&](std::string_view word, const auto& match) {
    const size_t bytes = step.mark.size();
    for (size_t at = word.find(step.mark); at != word.npos; at = word.find(step.mark, at + bytes)) {
      match(at, at + bytes);
    }
  });
}

}  // namespace moiety::data::bpe
