// Both products of a router's backward pass in one launch, on Hopper's tensor cores: the gradient of
// its logits meets w, plus an addend, and meets h. Internal to moiety/gemm and moiety/moe.
//
// The gradient comes as three bfloat16 pieces that add up to it, [T, 3 width]: E columns of each
// piece, then zeros. A block has 128 columns of h and a slice of the tokens, 64 at a time: it reads
// their pieces once for both products, so that what the two move through memory is what the first
// needs, and h. An element of either is one chain over pieces (the smallest first), 16 terms at a
// time; slices of the tokens are rows of `sums`, to be added in ascending order.
#pragma once

#include "moiety/base/gpu.h"
#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::gemm {

struct RouterProducts {
  TensorView pieces_TX;   // bfloat16 [T, 3 width], without gaps
  TensorView h_TD, w_ED;  // bfloat16
  TensorView addend_TD;   // float32, optional
  TensorView dh_TD;       // result, bfloat16: round(gradient w + addend)
  TensorView sums_SED;  // result, float32 [S, E, D] without gaps, optional: gradient^T h by slices
  // In place of an addend, optional: of token t it is the sum of the bfloat16 rows[slot[t, k]] over
  // k ascending, in float32, without those whose slot is negative, rounded to bfloat16. Up to 8
  // slots a token, without gaps.
  TensorView rows_CD = {}, slot_TK = {};
};

// Columns of a piece for so many experts; 0: more than the kernels take.
constexpr int64_t router_width(int64_t experts) {
  return experts <= 64 ? 64 : experts <= 128 ? 128 : 0;
}
// Slices of the tokens: a pure function of the sizes, so that blocks fill a large GPU.
int64_t router_slices(int64_t tokens, int64_t model);
// Whether the kernels take the operands but for `pieces_TX` and `sums_SED`, which may be absent.
bool takes_router_products(const RouterProducts& products, const GpuProperties& gpu);

void multiply_router(const RouterProducts& products, const Stream& stream);

}  // namespace moiety::gemm
