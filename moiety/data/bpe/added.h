// Added tokens: texts that become one id wherever they stand.
#pragma once

#include <bitset>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "moiety/data/bpe/regex.h"
#include "moiety/data/bpe/spec.h"

namespace moiety::data::bpe {

// A part of a text: an added token, or what stands between two of them.
struct Part {
  std::string_view text;  // not empty, unless it is a token
  std::optional<uint32_t> id;
};

// Some of the added tokens, by the texts that are looked for. For several threads.
class AddedTokens {
 public:
  // The texts stand in the order of the tokens. Throws Error(kUnsupported) for single_word in a build
  // without PCRE2.
  AddedTokens(std::vector<AddedToken> tokens, const std::vector<std::string>& texts);

  // The one with this content, or null.
  const AddedToken* find(std::string_view content) const;

  // The part of it that belongs to one thread.
  class Run {
   public:
    explicit Run(const AddedTokens& tokens);
    // Appends the parts of a text. The leftmost token counts, of several there the longest.
    // `special`: special tokens count too; else they stay text.
    void operator()(std::string_view text, bool special, std::vector<Part>& parts);

   private:
    bool is_in_word(const AddedToken& token, std::string_view text, size_t begin, size_t end);

    const AddedTokens& tokens_;
    std::optional<Matcher> word_;
  };

 private:
  struct Found {
    size_t begin, end, token;
  };
  // The first token in the text from `from` on.
  std::optional<Found> find(std::string_view text, size_t from) const;

  std::vector<AddedToken> tokens_;
  std::optional<Pattern> word_;  // of one character of a word, if a token asks for it
  // The texts as a trie: its node 0 is the root; the edges are by (node, byte).
  std::bitset<256> firsts_;
  std::unordered_map<uint64_t, uint32_t> edges_;
  std::vector<int64_t> ends_;  // by node: the token that ends there, or -1
};

}  // namespace moiety::data::bpe
