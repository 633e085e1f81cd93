#include "moiety/data/bpe/added.h"

#include <algorithm>

#include "moiety/data/bpe/code_points.h"

namespace moiety::data::bpe {
namespace {

// A word is another one here than in patterns: with joiners, and without fractions.
constexpr const char* kWord =
    R"([\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{24b6}-\x{24e9}\x{1f130}-\x{1f149}\x{1f150}-\x{1f169})"
    R"(\x{1f170}-\x{1f189}\x{200c}\x{200d}])";

bool is_space(char32_t c) {
  return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

size_t last_character(std::string_view text, size_t end) {
  size_t at = end - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) --at;
  return at;
}

// Where the spaces that end at `end` begin.
size_t spaces_before(std::string_view text, size_t end) {
  while (end > 0) {
    const size_t at = last_character(text, end);
    if (!is_space(code_point(text.substr(at)))) break;
    end = at;
  }
  return end;
}

size_t spaces_behind(std::string_view text, size_t at) {
  while (at < text.size() && is_space(code_point(text.substr(at)))) at = next_character(text, at);
  return at;
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens, const std::vector<std::string>& texts)
    : tokens_(std::move(tokens)), ends_(1, -1) {
  for (size_t t = 0; t < tokens_.size(); ++t) {
    if (texts[t].empty()) continue;
    firsts_.set(static_cast<unsigned char>(texts[t][0]));
    uint32_t node = 0;
    for (const char c : texts[t]) {
      const uint64_t edge = uint64_t{node} << 8 | static_cast<unsigned char>(c);
      const auto [it, is_new] = edges_.emplace(edge, static_cast<uint32_t>(ends_.size()));
      if (is_new) ends_.push_back(-1);
      node = it->second;
    }
    if (ends_[node] < 0) ends_[node] = static_cast<int64_t>(t);
    if (tokens_[t].single_word && !word_) {
      word_.emplace(Sought{true, kWord, "added_tokens: single_word"});
    }
  }
}

std::optional<AddedTokens::Found> AddedTokens::find(std::string_view text, size_t from) const {
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!firsts_[static_cast<unsigned char>(text[begin])]) continue;
    std::optional<Found> found;
    uint32_t node = 0;
    for (size_t at = begin; at < text.size(); ++at) {
      const auto it = edges_.find(uint64_t{node} << 8 | static_cast<unsigned char>(text[at]));
      if (it == edges_.end()) break;
      node = it->second;
      if (ends_[node] >= 0) found = Found{begin, at + 1, static_cast<size_t>(ends_[node])};
    }
    if (found) return found;
  }
  return std::nullopt;
}

const AddedToken* AddedTokens::find(std::string_view content) const {
  const auto it = std::find_if(tokens_.begin(), tokens_.end(),
                               [&](const AddedToken& token) { return token.content == content; });
  return it == tokens_.end() ? nullptr : &*it;
}

AddedTokens::Run::Run(const AddedTokens& tokens) : tokens_(tokens) {
  if (tokens.word_) word_.emplace(*tokens.word_);
}

bool AddedTokens::Run::is_in_word(const AddedToken& token, std::string_view text, size_t begin,
                                  size_t end) {
  if (!token.single_word) return false;
  const auto is_word = [&](size_t at) {
    return word_->find(text.substr(at, character_bytes(text[at])), 0).has_value();
  };
  return (begin > 0 && is_word(last_character(text, begin))) || (end < text.size() && is_word(end));
}

void AddedTokens::Run::operator()(std::string_view text, bool special, std::vector<Part>& parts) {
  const auto add_text = [&](size_t begin, size_t end) {
    if (begin < end) parts.push_back({text.substr(begin, end - begin), std::nullopt});
  };
  size_t done = 0, from = 0;
  while (const std::optional<Found> found = tokens_.find(text, from)) {
    const AddedToken& token = tokens_.tokens_[found->token];
    from = found->end;  // also behind one that does not count
    if ((token.special && !special) || is_in_word(token, text, found->begin, found->end)) continue;
    size_t begin = found->begin, end = found->end;
    if (token.lstrip) begin = std::max(spaces_before(text, begin), done);
    if (token.rstrip) end = spaces_behind(text, end);
    add_text(done, begin);
    parts.push_back({{}, token.id});
    done = end;
  }
  add_text(done, text.size());
}

}  // namespace moiety::data::bpe
