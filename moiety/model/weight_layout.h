// The cuts of a model's big weights by tensor parallelism
// (docs/spec/trainer.md#tensor-parallelism). Rows are those of the matrix in memory: q-k-v is
// ordered by groups of query heads, key head and value head; the fc1 of a gate has rank 0's gate
// rows, then its up rows, then those of rank 1, and so on. Experts, norms, router and gate are not cut.
#pragma once

#include <optional>
#include <string>

#include "moiety/gemm/quantized_operand.h"
#include "moiety/gtp/layout.h"
#include "moiety/model/config.h"
#include "moiety/model/precision.h"

namespace moiety::model {

// The place of a rank among those that a weight is cut over.
struct TpPlace {
  int rank = 0, size = 1;
};

// Embedding and head are cut by vocabulary, in slices of whole 16 rows; the last slices are short
// or empty.
gtp::Layout vocabulary_layout(const Config& config, TpPlace place);
// Attention is cut by heads.
gtp::Layout qkv_layout(const Config& config, TpPlace place);
gtp::Layout o_layout(const Config& config, TpPlace place);
// A feed-forward network of size `ffn` is cut by its inner columns.
gtp::Layout fc1_layout(const Config& config, int64_t ffn, TpPlace place);
gtp::Layout fc2_layout(const Config& config, int64_t ffn, TpPlace place);

// The rows of the whole weight that a tensor-parallel rank holds, over its gtp ranks, without
// padding.
gtp::Box tp_slice(gtp::Layout layout);

// Throws Error(kInvalidArgument) naming the first key or weight that so many ranks cannot cut, its
// size and the number that it has to be a multiple of: heads, and whole blocks of the recipe.
void check_tp(const Config& config, const Precision& precision, int ranks);

}  // namespace moiety::model
