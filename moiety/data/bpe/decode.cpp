#include "moiety/data/bpe/decode.h"

#include <charconv>

#include "moiety/data/bpe/code_points.h"
#include "moiety/data/bpe/normalize.h"

namespace moiety::data::bpe {
namespace {

// The byte that a token such as <0x0A> stands for.
std::optional<char> fallback_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return std::nullopt;
  unsigned value = 0;
  const auto [end, error] = std::from_chars(token.data() + 3, token.data() + 5, value, 16);
  if (error != std::errc() || end != token.data() + 5) return std::nullopt;
  return static_cast<char>(value);
}

std::string without_marks(std::string_view token, const DecodeMetaspace& metaspace, bool is_first) {
  std::string out;
  for (size_t at = 0; at < token.size();) {
    if (!token.substr(at).starts_with(metaspace.mark)) {
      out += token[at++];
      continue;
    }
    if (!(is_first && metaspace.drops_first)) out += ' ';
    at += metaspace.mark.size();
  }
  return out;
}

// How many characters `c` the text begins with, and how many it ends with, `most` at most.
int64_t count_front(std::string_view text, std::string_view c, int64_t most) {
  int64_t n = 0;
  while (n < most && text.substr(size_t(n) * c.size()).starts_with(c)) ++n;
  return n;
}
int64_t count_back(std::string_view text, std::string_view c, int64_t most) {
  int64_t n = 0;
  while (n < most && text.substr(0, text.size() - size_t(n) * c.size()).ends_with(c)) ++n;
  return n;
}

}  // namespace

Decoder::Decoder(const std::optional<std::vector<DecodeStep>>& steps) : spaced_(!steps) {
  if (!steps) return;
  bool fused = false;
  for (const DecodeStep& step : *steps) {
    Stage& stage = stages_.emplace_back(Stage{step, std::nullopt, fused});
    if (const auto* replace = std::get_if<Replace>(&step)) stage.pattern.emplace(replace->sought);
    fused =
        fused || std::holds_alternative<Fuse>(step) || std::holds_alternative<DecodeBytes>(step);
  }
}

Decoder::Run::Run(const Decoder& decoder) : decoder_(decoder), states_(decoder.stages_.size()) {
  for (const Stage& stage : decoder.stages_) {
    auto& matcher = matchers_.emplace_back();
    if (stage.pattern) matcher.emplace(*stage.pattern);
  }
}

void Decoder::Run::add(std::string token, std::string& out) {
  if (decoder_.spaced_ && !is_first_) out += ' ';
  is_first_ = false;
  step(0, std::move(token), out);
}

void Decoder::Run::step(size_t i, std::string token, std::string& out) {
  if (i == decoder_.stages_.size()) {
    out += token;
    return;
  }
  const DecodeStep& decode = decoder_.stages_[i].step;
  const bool is_first = states_[i].tokens++ == 0;
  if (std::holds_alternative<DecodeBytes>(decode)) {
    if (std::optional<std::string> bytes = unspell_bytes(token)) token = std::move(*bytes);
  } else if (std::holds_alternative<ByteFallback>(decode)) {
    if (const std::optional<char> byte = fallback_byte(token)) token.assign(1, *byte);
  } else if (const auto* replace = std::get_if<Replace>(&decode)) {
    replace_all(token, *matchers_[i], replace->content);
  } else if (const auto* metaspace = std::get_if<DecodeMetaspace>(&decode)) {
    const bool begins = decoder_.stages_[i].is_fused || is_first;
    token = without_marks(token, *metaspace, begins);
  } else if (const auto* s = std::get_if<StripText>(&decode)) {
    return strip(i, *s, std::move(token), out);
  }
  step(i + 1, std::move(token), out);
}

void Decoder::Run::strip(size_t i, const StripText& strip, std::string token, std::string& out) {
  const std::string& c = strip.content;
  State& state = states_[i];
  if (!decoder_.stages_[i].is_fused) {
    const int64_t front = count_front(token, c, strip.start);
    const int64_t back = count_back(token, c, strip.stop);
    const size_t begin = size_t(front) * c.size(), gone = begin + size_t(back) * c.size();
    return step(i + 1, gone < token.size() ? token.substr(begin, token.size() - gone) : "", out);
  }
  if (state.stripped >= 0) {
    const int64_t n = count_front(token, c, strip.start - state.stripped);
    token.erase(0, size_t(n) * c.size());
    state.stripped = token.empty() ? state.stripped + n : -1;
  }
  token.insert(0, state.held);
  const size_t held = size_t(count_back(token, c, strip.stop)) * c.size();
  state.held = token.substr(token.size() - held);
  token.erase(token.size() - held);
  step(i + 1, std::move(token), out);
}

}  // namespace moiety::data::bpe
