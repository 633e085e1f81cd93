// The grouped linear layer: one matrix product per expert over groups of rows whose sizes are data.
//
//    kForward  out[r, n] = sum_c a[r, c] . w[e, n, c]            x, w -> y
//    kDgrad    out[r, c] = sum_n a[r, n] . w[e, n, c]            dy, w -> dx
//    kWgrad    w[e, n, c] = sum_{r in e} a[r, n] . b[r, c]       dy, x -> dw
//
// The epilogue runs per element, in fp32 and in this order: v = alpha_e * acc; if beta_e != 0 then
// v = fma(beta_e, old, v), where old is the element of the output; bias v = v + bias[e, n], or with
// bias_scale v = fma(bias[e, n], bias_scale[r], v); one rounding. beta_e = 0 never reads old.
//
// Operands are all fp32 or all bf16, outputs fp32 or bf16 (with fp64 all are, and the reference
// computes, for gradient checks). Columns are contiguous, row strides free; outputs overlap no
// input. For an empty group kForward and kDgrad write nothing; kWgrad runs its epilogue on acc = +0
// (so beta = 0 writes +0, and alpha 1, beta 1 keep the bits). Inf and NaN of a live row stay in its
// row or expert.
//
// Quantized operands are bf16 matrices of quant/dequantize.h. The scales that they leave to the
// accumulators (gemm.h) are applied before the epilogue. The operands of kWgrad may lie transposed,
// like the col data of grouped tensors: a [N, capacity], b [C, capacity], where a group is a range
// of columns.
//
// Bits are those of gemm.h. For group e they depend only on its rows and weight: not on other
// groups, begin, capacity, expected_rows, packed or indexed, or threads. Faults are described in
// grouped_tensor.h. On GPUs split sizes are read there; fp32 has the reference's bits, bf16 is
// within L * 2^-23 * sum|a b| of it, L the reduction's length (tile_gemm.h).
#pragma once

#include "moiety/gemm/gemm.h"
#include "moiety/gemm/grouped_tensor.h"

namespace moiety::gemm {

enum class GroupedOp { kForward, kDgrad, kWgrad };

// A factor for every group: one number, or float32 [1] or [E] that is read when the operation runs.
struct GroupScalar {
  float value = 0;
  TensorView per_group = {};  // optional, instead of `value`

  float of(int64_t e) const {
    if (!per_group.defined()) return value;
    return per_group.data<float>()[per_group.numel() == 1 ? 0 : e];
  }
};

struct GroupedGemmArgs {
  GroupedOp op = GroupedOp::kForward;
  Groups groups;
  GroupedTensor a;               // kForward: x [., C]; kDgrad and kWgrad: dy [., N]
  GroupedTensor b = {};          // kWgrad: x [., C]
  GroupedWeight w;               // kForward and kDgrad read it; kWgrad writes it: the gradient
  TensorView out = {};           // kForward: [capacity, N]; kDgrad: [capacity, C]
  TensorView bias_EN = {};       // kForward, optional: in the dtype of the operands
  TensorView bias_scale_R = {};  // float32 [capacity], optional, only with bias
  GroupScalar alpha = {.value = 1};
  GroupScalar beta = {};
  bool transposed = false;    // kWgrad: a and b are transposed; no source_R then
  OperandScale a_scale = {};  // transposed: rows N, slices of columns
  OperandScale b_scale = {};  // scales of w for kForward and kDgrad
  int sm_limit = 0;           // GPU: the most multiprocessors that it takes; 0: all
};

void grouped_gemm(const GroupedGemmArgs& args, Stream stream);

// The gradient of the bias: dbias[e, n] = sum_r dy[r, n], with `scale_R` the sum of fma(dy,
// scale[r], acc), in blocks of 128 rows from the group's start, ascending from +0; then the blocks'
// sums are added in ascending order; then follows the epilogue above (alpha 1, beta).
struct GroupedBiasGradArgs {
  Groups groups;
  GroupedTensor dy;         // [., N]
  TensorView scale_R = {};  // float32 [capacity], optional
  TensorView dbias_EN;      // float32 or the dtype of dy
  GroupScalar beta = {};
};
void grouped_bias_grad(const GroupedBiasGradArgs& args, Stream stream);

// The gradient of the probability of a scaled bias: dscale[r] = old + the canonical row dot of
// dy[r, :] and bias[e, :] (swiglu.h); without `accumulate` dscale[r] is only that dot.
struct GroupedScaleGradArgs {
  Groups groups;
  GroupedTensor dy;         // [., N]
  TensorView bias_EN = {};  // dtype of dy
  TensorView dscale_R;      // float32 [capacity]
  bool accumulate = false;
};
void grouped_scale_grad(const GroupedScaleGradArgs& args, Stream stream);

}  // namespace moiety::gemm
