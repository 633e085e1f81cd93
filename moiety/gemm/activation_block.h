// The activations of a range of rows, computed by the calling thread, and their formulas. Internal
// to moiety/gemm; the contract is in swiglu.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "moiety/base/host_device.h"
#include "moiety/base/math.h"
#include "moiety/gemm/swiglu.h"

namespace moiety::gemm {

struct ActivationBlock {
  Activation activation;
  int64_t interleave = 0;
  int64_t ffn = 0;
  DType dtype = DType::kFloat32;
  int64_t begin = 0, rows = 0;  // rows of all the buffers below; strides in elements
  const void* h = nullptr;
  int64_t h_stride = 0;
  const void* prob = nullptr;  // float, or double with fp64; null stands for 1
  void* a = nullptr;           // backward: optional
  int64_t a_stride = 0;
  const void* da = nullptr;  // from here on only for backward
  int64_t da_stride = 0;
  void* dh = nullptr;
  int64_t dh_stride = 0;
  void* dprob = nullptr;  // optional, like prob
};

// Throws Error(kInvalidArgument) unless s is 0 or a multiple of 8 that divides F.
void check_interleave(const char* operation, int64_t interleave, int64_t ffn);

void activation_forward_reference(const ActivationBlock& block);
void activation_backward_reference(const ActivationBlock& block);
void activation_forward_cpu(const ActivationBlock& block);  // fp32 and bf16
void activation_backward_cpu(const ActivationBlock& block);
// All live rows on a GPU; the kernel also reports to the sink and the groups' status.
void activation_forward_cuda(const ActivationArgs& args, const ActivationBlock& block, TensorView a,
                             const Stream& stream);
void activation_backward_cuda(const ActivationArgs& args, const ActivationBlock& block,
                              TensorView da, TensorView dh, TensorView a, const Stream& stream);

// The column of H that holds element f of half h.
template <class Int>
MOIETY_HD_INLINE Int hidden_column(int h, Int f, Int ffn, std::type_identity_t<Int> interleave) {
  if (interleave == 0) return h * ffn + f;
  return f / interleave * 2 * interleave + h * interleave + f % interleave;
}

// y, and the gradients of a and b.
template <class Math>
struct ActivationGradient {
  Math y, a, b;
};

template <class Math>
MOIETY_HD_INLINE Math glu_linear(const Activation& p, Math b) {
  const Math limit = p.limit;
  const Math b1 = b > limit ? limit : b < -limit ? -limit : b;
  return p.offset == 0 ? b1 : b1 + static_cast<Math>(p.offset);
}

template <class Math>
MOIETY_HD_INLINE Math glu(const Activation& p, Math a, Math b) {
  const Math a1 = a > static_cast<Math>(p.limit) ? static_cast<Math>(p.limit) : a;
  const Math g = a1 * sigmoid(static_cast<Math>(p.alpha) * a1);
  return g * glu_linear(p, b);
}

// `t` is the gradient of y.
template <class Math>
MOIETY_HD_INLINE ActivationGradient<Math> glu_gradient(const Activation& p, Math a, Math b,
                                                       Math t) {
  const Math limit = p.limit, alpha = p.alpha;
  const Math a1 = a > limit ? limit : a;
  const Math s = sigmoid(alpha * a1);
  const Math g = a1 * s;
  const Math d = std::fma(alpha * g, 1 - s, s);
  const Math b1 = glu_linear(p, b);
  const Math da = t * (d * b1), db = t * g;
  return {g * b1, a > limit ? 0 : da, std::fabs(b) > limit ? 0 : db};
}

template <class Math>
MOIETY_HD_INLINE Math squared_relu(Math a) {
  const Math r = a < 0 ? 0 : a;
  return r * r;
}

template <class Math>
MOIETY_HD_INLINE Math squared_relu_gradient(Math a, Math t) {
  const Math r = a < 0 ? 0 : a;
  return t * (r + r);
}

}  // namespace moiety::gemm
