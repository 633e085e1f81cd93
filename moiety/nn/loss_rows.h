// Pieces of the cross-entropy of one row of logits, between which ranks with slices of the
// vocabulary can talk to each other. All are in fp32; the fast path of moiety/nn/loss.h consists of
// them.
#pragma once

#include <cstdint>

#include "moiety/base/dtype.h"

namespace moiety::nn {

// The largest of z[0 ... n); -inf if there is none.
float row_max(const float* z, int64_t n);
// e[v] = exp(z[v] - max), where max is at least every z[v]; returns the sum of e in the order of
// lane_sum. e may be z.
float row_exponentials(const float* z, int64_t n, float max, float* e);
// dz[v] = round(factor e[v] - (v == target ? 1 : 0)), bfloat16 or float32. dz may be e.
void row_gradient(const float* e, int64_t n, float factor, int64_t target, void* dz, DType dtype);

}  // namespace moiety::nn
