// Tokenizers: text to token ids and back. One is built in: "bytes" (ids 0..255 are bytes, 256 eos,
// 257 bos, 258 pad; V = 264, so that sizes stay multiples of 8).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/data/sha256.h"

namespace moiety::data {

class Tokenizer {
 public:
  // The tokenizer called `name`, as in data.tokenizer; throws UsageError if there is none.
  static Tokenizer load(std::string_view name);

  const std::string& name() const { return name_; }
  uint32_t vocab() const { return 264; }
  uint32_t eos() const { return 256; }
  uint32_t bos() const { return 257; }
  uint32_t pad() const { return 258; }
  // An identity that is equal for tokenizers that give equal ids for every text: the SHA-256 of a
  // line that defines the byte tokenizer.
  const Sha256& identity() const { return identity_; }

  // Appends the ids of the text, without eos or bos.
  void encode(std::string_view text, std::vector<uint32_t>& ids) const;
  // The bytes of the ids; special and unused ids give none. The bytes need not be UTF-8.
  std::string decode(std::span<const int32_t> ids) const;

 private:
  Tokenizer() = default;
  std::string name_;
  Sha256 identity_{};
};

}  // namespace moiety::data
