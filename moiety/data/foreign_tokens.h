// Token files of other projects: their documents, as ids.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace moiety::data {

enum class ForeignTokens {
  // llm.c's .bin: 256 int32 (magic 20240520 with uint16 ids, or 20240801 with uint32; version; number
  // of ids), then ids. A document begins with the end-of-text token.
  kLlmc,
  // Megatron-LM's indexed data set: PREFIX.idx (magic MMIDIDX, version 1) and PREFIX.bin, with ids of
  // 1, 2, 4 or 8 bytes.
  kMegatron,
};

// Gives the documents of a file, in order, to `add`. `path` is the .bin or, of Megatron, one of both
// files; `separator` is the token with which documents of llm.c begin. Throws DataError for a file
// that is damaged, cut off, or has an id >= vocab.
void read_foreign_tokens(ForeignTokens kind, const std::string& path, uint32_t separator,
                         uint32_t vocab, const std::function<void(std::span<const uint32_t>)>& add);

}  // namespace moiety::data
