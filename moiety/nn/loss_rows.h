// Pieces of the cross-entropy of one row of logits, between which ranks with slices of the
// vocabulary can talk to each other. All are in fp32; the fast path of moiety/nn/loss.h consists of
// them.
#pragma once

#include <cstdint>

#include "moiety/base/dtype.h"
#include "moiety/base/math.h"

namespace moiety::nn {

// The sum of a row: of each group of 256 elements, and then of the groups' sums, both in the order
// of lane_sum. term(v, i) adds element i to v.
inline constexpr int64_t kLossGroup = 256;
template <class T, class Term>
MOIETY_INLINE T loss_sum(int64_t n, Term&& term) {
  return lane_sum<T>((n + kLossGroup - 1) / kLossGroup, [&](T v, int64_t group) {
    const int64_t begin = group * kLossGroup, end = begin + kLossGroup < n ? begin + kLossGroup : n;
    return v + lane_sum<T>(end - begin, [&](T w, int64_t i) { return term(w, begin + i); });
  });
}

// The largest of z[0 ... n); -inf if there is none.
float row_max(const float* z, int64_t n);
// e[v] = exp(z[v] - max), where max is at least every z[v]; returns the loss_sum of e. e may
// be z.
float row_exponentials(const float* z, int64_t n, float max, float* e);
// dz[v] = round(factor e[v] - (v == target ? 1 : 0)), bfloat16 or float32. dz may be e.
void row_gradient(const float* e, int64_t n, float factor, int64_t target, void* dz, DType dtype);

}  // namespace moiety::nn
