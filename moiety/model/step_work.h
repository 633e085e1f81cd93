// The work of the parts of a pass, for the planner: FLOPs and bytes from shapes alone. A running
// step and the trace of one that nobody runs (step_trace.h) use the same functions. Routing is
// taken to be balanced.
#pragma once

#include <optional>

#include "moiety/base/dtype.h"
#include "moiety/formats/quantized.h"
#include "moiety/gtp/recorder.h"

namespace moiety::model {

// The product of [rows, k] and [n, k]^T, or of its gradients. With `members` experts, `rows` counts
// their rows together.
gtp::Work product_work(int64_t rows, int64_t n, int64_t k, DType storage, int64_t members = 1);

// The products of attention over the causal half of the scores; there are two `products` in forward
// and five in backward. q, k and v of `qkv` columns move, and o of `o` columns.
gtp::Work attention_work(int products, int64_t tokens, int64_t seq_len, int64_t qkv, int64_t o,
                         DType storage);

// An operation that reads and writes this many elements.
gtp::Work elementwise_work(int64_t elements, DType storage);

// An exchange of rows of `d` elements with the ranks of their experts, in one direction; in the
// format, if there is one.
struct ExchangeShape {
  int64_t tokens = 0, d = 0, experts = 0, top_k = 0;
  int ranks = 1;  // ranks of the expert-parallel group
};
gtp::Work exchange_work(const ExchangeShape& shape, DType storage,
                        const std::optional<QuantSpec>& format = {});

}  // namespace moiety::model
