// What the parts of a pass compute and move, for the planner: from shapes alone, by the same
// functions whether a step runs or nobody runs it (step_trace.h). Routing is taken to be balanced.
#pragma once

#include "moiety/base/dtype.h"
#include "moiety/gtp/recorder.h"

namespace moiety::model {

// A product of [rows, k] and [n, k]^T, or of its gradients; of `members` experts, whose rows are
// counted together.
gtp::Work product_work(int64_t rows, int64_t n, int64_t k, DType storage, int64_t members = 1);

// Of the products of attention, `products` of which there are two forward and five backward, over
// the causal half of the scores; q, k, v of `qkv` columns and o of `o` move.
gtp::Work attention_work(int products, int64_t tokens, int64_t seq_len, int64_t qkv, int64_t o,
                         DType storage);

// That reads and writes this many elements.
gtp::Work elementwise_work(int64_t elements, DType storage);

// Rows of `d` elements to the ranks of their experts, or back.
struct ExchangeShape {
  int64_t tokens = 0, d = 0, experts = 0, top_k = 0;
  int ranks = 1;  // of the expert-parallel group
};
gtp::Work exchange_work(const ExchangeShape& shape, DType storage);

}  // namespace moiety::model
