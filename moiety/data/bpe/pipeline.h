// All of a tokenizer.json together: text becomes ids, and ids text.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "moiety/data/bpe/added.h"
#include "moiety/data/bpe/decode.h"
#include "moiety/data/bpe/merge.h"
#include "moiety/data/bpe/normalize.h"
#include "moiety/data/bpe/spec.h"
#include "moiety/data/bpe/split.h"

namespace moiety::data::bpe {

// For several threads.
class Pipeline {
 public:
  // `file` is the name of the tokenizer.json in errors.
  Pipeline(const Spec& spec, const std::string& file);
  ~Pipeline();

  uint32_t vocab() const { return vocab_; }
  // The id of a token, or nothing.
  std::optional<uint32_t> find(const std::string& token) const;
  // The added token of this text, or null.
  const AddedToken* find_added(std::string_view token) const;
  // Appends the ids of a text; `special`: special tokens in it are ids, else text; `is_start`: it
  // stands behind no token. Throws DataError if it is not UTF-8.
  void encode(std::string_view text, bool special, std::vector<uint32_t>& ids,
              bool is_start = true) const;

  // The spelling of an id that is text; none for special and unused ids.
  const std::string* spelling(uint32_t id) const;
  // The content of a special token; none for other ids.
  const std::string* special(uint32_t id) const;
  const Decoder& decoder() const { return decoder_; }

 private:
  struct Worker;
  std::unique_ptr<Worker> hire() const;
  void encode_part(std::string_view text, bool is_start, Worker& worker,
                   std::vector<uint32_t>& ids) const;

  std::string file_;
  uint32_t vocab_ = 0;
  std::unordered_map<std::string, uint32_t> tokens_;
  std::vector<std::string> spellings_;  // by id
  std::vector<char> is_text_;
  Normalizer normalizer_;
  AddedTokens raw_, normalized_;  // looked for before and behind normalization
  Splitter splitter_;
  Model model_;
  Decoder decoder_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Worker>> idle_;
};

// What changes ids, as a text that is equal for files that give equal ids: for an identity.
std::string canonical(const Spec& spec);

}  // namespace moiety::data::bpe
