// How tensor parallelism cuts the big weights of a model (docs/spec/trainer.md#tensor-parallelism).
// Rows are those of the matrix in memory: q-k-v by groups of query heads, key head and value head;
// fc1 of rank 0 its gate rows, then its up rows, then those of rank 1 ... Experts, norms, router
// and gate are not cut.
#pragma once

#include <optional>
#include <string>

#include "moiety/gemm/quantized_operand.h"
#include "moiety/gtp/layout.h"
#include "moiety/model/config.h"
#include "moiety/model/precision.h"

namespace moiety::model {

// Where a rank stands among those that a weight is cut over.
struct TpPlace {
  int rank = 0, size = 1;
};

// Embedding and head: by vocabulary, in slices of whole 16 rows; the last ones are short or empty.
gtp::Layout vocabulary_layout(const Config& config, TpPlace place);
// Attention: heads.
gtp::Layout qkv_layout(const Config& config, TpPlace place);
gtp::Layout o_layout(const Config& config, TpPlace place);
// A gated feed-forward network of size `ffn`: its inner columns.
gtp::Layout fc1_layout(const Config& config, int64_t ffn, TpPlace place);
gtp::Layout fc2_layout(const Config& config, int64_t ffn, TpPlace place);

// What a tensor-parallel rank holds of the whole weight, over its gtp ranks: the rows that exist.
gtp::Box tp_slice(gtp::Layout layout);

// Throws Error(InvalidArgument) naming the first key or weight that so many ranks cannot cut, its
// size and what that has to be a multiple of: heads, and whole blocks of the recipe.
void check_tp(const Config& config, const Precision& precision, int ranks);

}  // namespace moiety::model
