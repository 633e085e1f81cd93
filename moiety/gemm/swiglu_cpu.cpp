// Activations on CPUs: rows in segments of 64 columns, widened to arrays that the compiler keeps in
// vector registers.
#include <algorithm>

#include "moiety/formats/bf16.h"
#include "moiety/gemm/activation_block.h"
#include "moiety/gemm/row_dot.h"

namespace moiety::gemm {
namespace {

constexpr int64_t kSegment = kDotSegment;

template <class T>
MOIETY_INLINE void load(const T* in, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = in[i];
}

template <class T>
MOIETY_INLINE void store(const float* in, int64_t n, T* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(in[i]);
}

// Moves columns [f, f + n) of one half of a row of H: contiguous, or in runs of the interleave.
template <bool kStore, class T, class Values>
MOIETY_INLINE void move_half(const ActivationBlock& b, T* row, int half, int64_t f, int64_t n,
                             Values* values) {
  const bool gated = b.activation.kind == ActivationKind::kGlu;
  const int64_t run = gated && b.interleave > 0 ? b.interleave : b.ffn;
  if (run == b.ffn) {  // without the divisions
    if constexpr (kStore) {
      store(values, n, row + half * b.ffn + f);
    } else {
      load(row + half * b.ffn + f, n, values);
    }
    return;
  }
  for (int64_t i = 0; i < n;) {
    const int64_t piece = std::min(run - (f + i) % run, n - i);
    T* at = row + hidden_column(half, f + i, b.ffn, gated ? b.interleave : 0);
    if constexpr (kStore) {
      store(values + i, piece, at);
    } else {
      load(at, piece, values + i);
    }
    i += piece;
  }
}

// One segment of a row. Columns past its end hold zeros or old values and are not stored.
struct Segment {
  alignas(64) float a[kSegment] = {};
  alignas(64) float b[kSegment] = {};
  alignas(64) float y[kSegment];
  alignas(64) float scaled[kSegment];
  alignas(64) float da[kSegment] = {};

  MOIETY_INLINE void activate(const Activation& p) {
    if (p.kind == ActivationKind::kGlu) {
      for (int64_t i = 0; i < kSegment; ++i) y[i] = glu(p, a[i], b[i]);
    } else {
      for (int64_t i = 0; i < kSegment; ++i) y[i] = squared_relu(a[i]);
    }
  }
  // Computes y and replaces a and b by their gradients.
  MOIETY_INLINE void differentiate(const Activation& p, const float* prob) {
    for (int64_t i = 0; i < kSegment; ++i) scaled[i] = prob ? da[i] * *prob : da[i];
    if (p.kind == ActivationKind::kGlu) {
      for (int64_t i = 0; i < kSegment; ++i) {
        const ActivationGradient<float> d = glu_gradient(p, a[i], b[i], scaled[i]);
        y[i] = d.y;
        a[i] = d.a;
        b[i] = d.b;
      }
    } else {
      for (int64_t i = 0; i < kSegment; ++i) {
        y[i] = squared_relu(a[i]);
        a[i] = squared_relu_gradient(a[i], scaled[i]);
      }
    }
  }
  template <class T>
  MOIETY_INLINE void store_a(const float* prob, int64_t n, T* out) {
    for (int64_t i = 0; i < kSegment; ++i) scaled[i] = prob ? y[i] * *prob : y[i];
    store(scaled, n, out);
  }
  MOIETY_INLINE float dot(int64_t n) const {
    if (n < kSegment) {
      return dot_segment<float>(
          n, [&](int64_t i) { return da[i]; }, [&](int64_t i) { return y[i]; });
    }
    // Even and odd elements apart, so that the four sums are a vector.
    alignas(64) float x[2][kSegment / 2], z[2][kSegment / 2];
    for (int64_t i = 0; i < kSegment / 2; ++i) {
      x[0][i] = da[2 * i];
      x[1][i] = da[2 * i + 1];
      z[0][i] = y[2 * i];
      z[1][i] = y[2 * i + 1];
    }
    float lane[4] = {};
    for (int64_t j = 0; j < kSegment / 2; j += 4) {
      for (int64_t q = 0; q < 4; ++q) lane[q] = std::fma(x[0][j + q], z[0][j + q], lane[q]);
      for (int64_t q = 0; q < 4; ++q) lane[q] = std::fma(x[1][j + q], z[1][j + q], lane[q]);
    }
    return (lane[0] + lane[1]) + (lane[2] + lane[3]);
  }
};

// kSwiglu: the activation is that, whose constants then cost nothing.
template <class T, bool kSwiglu>
MOIETY_INLINE void forward(const ActivationBlock& block) {
  const Activation activation = kSwiglu ? swiglu() : block.activation;
  const bool gated = activation.kind == ActivationKind::kGlu;
  Segment s;
  for (int64_t r = block.begin; r < block.begin + block.rows; ++r) {
    const T* h = static_cast<const T*>(block.h) + r * block.h_stride;
    T* a = static_cast<T*>(block.a) + r * block.a_stride;
    const float* prob = block.prob ? static_cast<const float*>(block.prob) + r : nullptr;
    for (int64_t f = 0; f < block.ffn; f += kSegment) {
      const int64_t n = std::min(kSegment, block.ffn - f);
      move_half<false>(block, h, 0, f, n, s.a);
      if (gated) move_half<false>(block, h, 1, f, n, s.b);
      s.activate(activation);
      s.store_a(prob, n, a + f);
    }
  }
}

template <class T, bool kSwiglu>
MOIETY_INLINE void backward(const ActivationBlock& block) {
  const Activation activation = kSwiglu ? swiglu() : block.activation;
  const bool gated = activation.kind == ActivationKind::kGlu;
  Segment s;
  for (int64_t r = block.begin; r < block.begin + block.rows; ++r) {
    const T* h = static_cast<const T*>(block.h) + r * block.h_stride;
    const T* da = static_cast<const T*>(block.da) + r * block.da_stride;
    T* dh = static_cast<T*>(block.dh) + r * block.dh_stride;
    const float* prob = block.prob ? static_cast<const float*>(block.prob) + r : nullptr;
    float dprob = 0;
    for (int64_t f = 0; f < block.ffn; f += kSegment) {
      const int64_t n = std::min(kSegment, block.ffn - f);
      move_half<false>(block, h, 0, f, n, s.a);
      if (gated) move_half<false>(block, h, 1, f, n, s.b);
      load(da + f, n, s.da);
      s.differentiate(activation, prob);
      if (block.a) s.store_a(prob, n, static_cast<T*>(block.a) + r * block.a_stride + f);
      if (block.dprob) dprob += s.dot(n);
      move_half<true>(block, dh, 0, f, n, s.a);
      if (gated) move_half<true>(block, dh, 1, f, n, s.b);
    }
    if (block.dprob) static_cast<float*>(block.dprob)[r] = dprob;
  }
}

MOIETY_INLINE bool is_swiglu(const Activation& p) {
  return p.kind == ActivationKind::kGlu && p.alpha == 1 && p.limit == swiglu().limit &&
         p.offset == 0;
}

template <class T>
MOIETY_INLINE void forward(const ActivationBlock& block) {
  return is_swiglu(block.activation) ? forward<T, true>(block) : forward<T, false>(block);
}
template <class T>
MOIETY_INLINE void backward(const ActivationBlock& block) {
  return is_swiglu(block.activation) ? backward<T, true>(block) : backward<T, false>(block);
}

MOIETY_SIMD_CLONES void forward_fp32(const ActivationBlock& block) { forward<float>(block); }
MOIETY_SIMD_CLONES void forward_bf16(const ActivationBlock& block) { forward<bf16>(block); }
MOIETY_SIMD_CLONES void backward_fp32(const ActivationBlock& block) { backward<float>(block); }
MOIETY_SIMD_CLONES void backward_bf16(const ActivationBlock& block) { backward<bf16>(block); }

}  // namespace

void activation_forward_cpu(const ActivationBlock& block) {
  return block.dtype == DType::kBFloat16 ? forward_bf16(block) : forward_fp32(block);
}

void activation_backward_cpu(const ActivationBlock& block) {
  return block.dtype == DType::kBFloat16 ? backward_bf16(block) : backward_fp32(block);
}

}  // namespace moiety::gemm
