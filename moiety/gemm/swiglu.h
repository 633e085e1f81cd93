// Activations between the two linears of an MLP, with the router's probability
// (docs/spec/grouped.md#activations).
//
// H [rows, 2F] holds the activated half a and the linear half b, A [rows, F] is the result; p is
// the probability of the row (1 if absent), dA the gradient of the stored A, t = dA * p.
//
//    kGlu          a1 = a > limit ? limit : a;  b1 = clamp(b, +-limit) + offset
//                  s = sigmoid(alpha * a1);  g = a1 * s;  y = g * b1;  d = fma(alpha * g, 1 - s, s)
//                  da = a > limit ? 0 : t * (d * b1);  db = |b| > limit ? 0 : t * g
//    kSquaredRelu  r = a < 0 ? 0 : a;  y = r * r;  da = t * (r + r);  no b, H is [rows, F]
//
// A = round(y * p), dH = round(da), round(db); dprob is the canonical row dot of dA and y, never a
// quotient by p. offset 0 adds nothing (-0 stays). Clamps are comparisons, so NaN passes, and the
// boundary keeps its gradient. Everything has the same bits on every device and path.
//
// The canonical row dot takes segments of 64 columns. Lane q = 0..3 owns columns 8j + 2q and 8j +
// 2q + 1 (j = 0..7) and adds them in ascending order with fma from +0; segment = (l0 + l1) + (l2 +
// l3); segments are added in ascending order from +0.
#pragma once

#include <limits>

#include "moiety/gemm/grouped_tensor.h"
#include "moiety/quant/amax_sink.h"

namespace moiety::gemm {

enum class ActivationKind { kGlu, kSquaredRelu };

// The parameters of an activation. The caller gives every one; none has a default.
struct Activation {
  ActivationKind kind;
  float alpha;
  float limit;
  float offset;

  // Whether H has a linear half b beside the activated one.
  bool gated() const { return kind == ActivationKind::kGlu; }
  // The columns of H for `ffn` columns of A.
  int64_t hidden(int64_t ffn) const { return gated() ? 2 * ffn : ffn; }
};

constexpr Activation swiglu() {
  return {ActivationKind::kGlu, 1, std::numeric_limits<float>::infinity(), 0};
}
constexpr Activation clamped_swiglu(float limit) { return {ActivationKind::kGlu, 1, limit, 0}; }
// The clamped gate of GPT-OSS is qgeglu(1.702, 7, 1).
constexpr Activation qgeglu(float alpha, float limit, float offset) {
  return {ActivationKind::kGlu, alpha, limit, offset};
}
constexpr Activation squared_relu() {
  return {ActivationKind::kSquaredRelu, 1, std::numeric_limits<float>::infinity(), 0};
}

// With interleave s, column (h, f) of H, where h = 0 for a and 1 for b, lies at (f / s) * 2s + h *
// s + f % s; with s = 0 at h * F + f. s is 0 or a multiple of 8 that divides F. A and dA keep plain
// order.
struct ActivationArgs {
  Activation activation;
  int64_t interleave = 0;
  Groups groups = {};      // optional (begin_E1 not defined): every row is live
  TensorView h;            // fp32 or bf16 [rows, 2F] (fp64: the reference, for gradient checks)
  TensorView prob_R = {};  // float32 [rows], optional (fp64 with fp64)
  // Optional, [E] with groups, else [1]: the amax of A, in backward that of dH.
  quant::AmaxSink sink = {};
};

// a [rows, F], in the dtype of h.
void activation_forward(const ActivationArgs& args, TensorView a, Stream stream);
// da [rows, F] and dh [rows, 2F] are in the dtype of h; dh may be exactly h. Optional are `a`,
// which receives A again (with the bits of forward), and dprob_R, float32 [rows].
void activation_backward(const ActivationArgs& args, TensorView da, TensorView dh, TensorView a,
                         TensorView dprob_R, Stream stream);

}  // namespace moiety::gemm
