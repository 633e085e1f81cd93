// Cases of the embedding, on a CPU and on a GPU.
#pragma once

#include "moiety/nn/embedding.h"
#include "tests/support/tensors.h"

namespace moiety::nn {

struct EmbeddingCase {
  const char* name;
  int64_t vocabulary, d_model;
  std::vector<int32_t> tokens;
};

inline std::vector<int32_t> repeated(int64_t n, int32_t modulus) {
  std::vector<int32_t> out;
  for (int64_t i = 0; i < n; ++i) out.push_back(static_cast<int32_t>(i * i % modulus));
  return out;
}

const EmbeddingCase kEmbeddingCases[] = {
    {"no_tokens", 5, 8, {}},
    {"one_token", 5, 8, {3}},
    {"one_row_table", 1, 3, repeated(130, 1)},
    {"more_than_a_block_of_one_token", 257, 9, repeated(700, 3)},
    {"many_tokens", 257, 16, repeated(500, 257)},
};

}  // namespace moiety::nn
