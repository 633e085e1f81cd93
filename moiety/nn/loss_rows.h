// Rows of logits: the pieces of cross-entropy between which ranks with slices of the vocabulary
// talk to each other. All in fp32; the fast path of moiety/nn/loss.h consists of them.
#pragma once

#include <cstdint>

#include "moiety/base/dtype.h"

namespace moiety::nn {

// The largest of z[0 ... n); -inf if there is none.
float row_max(const float* z, int64_t n);
// e[v] = exp(z[v] - max) for a max that no z[v] exceeds; returns their sum in the order of
// lane_sum. e may be z.
float row_exponentials(const float* z, int64_t n, float max, float* e);
// dz[v] = round(factor e[v]), less 1 before rounding where v == target. dz may be e: bfloat16 or
// float32.
void row_gradient(const float* e, int64_t n, float factor, int64_t target, void* dz, DType dtype);

}  // namespace moiety::nn
