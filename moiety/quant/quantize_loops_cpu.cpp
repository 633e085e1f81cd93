#include <bit>

#include "moiety/formats/e5m2.h"
#include "moiety/quant/byte_transpose.h"
#include "moiety/quant/hadamard.h"
#include "moiety/quant/quantize_loops.h"

namespace moiety::quant::loops {
namespace {

// Magnitudes are compared in the width of the input.
MOIETY_INLINE uint32_t magnitude(float x) { return abs_bits(x); }
MOIETY_INLINE uint16_t magnitude(bf16 x) { return static_cast<uint16_t>(x.bits & 0x7FFFu); }
MOIETY_INLINE uint32_t fp32_bits(uint32_t m) { return m; }
MOIETY_INLINE uint32_t fp32_bits(uint16_t m) { return static_cast<uint32_t>(m) << 16; }
template <class T>
using Magnitude = decltype(magnitude(T()));

template <class M>
MOIETY_INLINE M larger(M a, M b) {
  return a > b ? a : b;
}

template <class T>
MOIETY_INLINE uint32_t amax_of(const T* __restrict x, int64_t n) {
  Magnitude<T> m = 0;
  for (int64_t i = 0; i < n; ++i) m = larger(m, magnitude(x[i]));
  return fp32_bits(m);
}

template <int kBlock, class T>
MOIETY_INLINE void amax_of_blocks(const T* __restrict x, int64_t blocks, uint32_t* __restrict out) {
  for (int64_t b = 0; b < blocks; ++b) {
    Magnitude<T> m = 0;
    // Unrolled, the loop around it would be vectorized instead, with shuffles.
#pragma GCC unroll 1
    for (int i = 0; i < kBlock; ++i) m = larger(m, magnitude(x[b * kBlock + i]));
    out[b] = fp32_bits(m);
  }
}
template <class T>
MOIETY_INLINE void amax_by_block(const T* x, int block, int64_t blocks, uint32_t* out) {
  if (block == 16) amax_of_blocks<16>(x, blocks, out);
  if (block == 32) amax_of_blocks<32>(x, blocks, out);
  if (block == 128) amax_of_blocks<128>(x, blocks, out);
}

template <class T>
MOIETY_INLINE void amax_of_columns(const T* __restrict x, int64_t stride, int64_t rows,
                                   uint32_t* __restrict out) {
  alignas(64) Magnitude<T> m[kPanel] = {};
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < kPanel; ++c) m[c] = larger(m[c], magnitude(x[r * stride + c]));
  }
  for (int64_t c = 0; c < kPanel; ++c) out[c] = fp32_bits(m[c]);
}

template <int kBlock>
MOIETY_INLINE void spread_blocks(const float* __restrict factor, int64_t blocks,
                                 float* __restrict out) {
  for (int64_t b = 0; b < blocks; ++b) {
#pragma GCC unroll 1
    for (int i = 0; i < kBlock; ++i) out[b * kBlock + i] = factor[b];
  }
}

template <class F>
MOIETY_INLINE void mxfp8_blocks(const uint32_t* __restrict amax, int64_t n,
                                float* __restrict factor, uint8_t* __restrict scale) {
  for (int64_t i = 0; i < n; ++i) {
    scale[i] = mxfp8_scale<F>(std::bit_cast<float>(amax[i]));
    factor[i] = UE8M0::inverse(scale[i]);
  }
}

template <class T, class F>
MOIETY_INLINE void nearest(const void* input, const float* __restrict factor, int64_t n,
                           uint8_t* __restrict codes) {
  const T* __restrict x = static_cast<const T*>(input);
  for (int64_t i = 0; i < n; ++i) codes[i] = F::encode(static_cast<float>(x[i]) * factor[i]);
}
template <class T, class F>
MOIETY_INLINE void stochastic(const void* input, const float* __restrict factor,
                              const uint8_t* __restrict random, int64_t n,
                              uint8_t* __restrict codes) {
  const T* __restrict x = static_cast<const T*>(input);
  for (int64_t i = 0; i < n; ++i) {
    codes[i] = F::encode_stochastic(static_cast<float>(x[i]) * factor[i], random[i]);
  }
}

// Functions of several instruction sets cannot be templates.
#define MOIETY_ENCODE_LOOPS(T, F)                                                                  \
  MOIETY_SIMD_CLONES void nearest_##T##_##F(const void* x, const float* factor, const uint8_t*,    \
                                            int64_t n, uint8_t* codes) {                           \
    nearest<T, F>(x, factor, n, codes);                                                            \
  }                                                                                                \
  MOIETY_SIMD_CLONES void stochastic_##T##_##F(const void* x, const float* factor,                 \
                                               const uint8_t* random, int64_t n, uint8_t* codes) { \
    stochastic<T, F>(x, factor, random, n, codes);                                                 \
  }
MOIETY_ENCODE_LOOPS(float, E2M1)
MOIETY_ENCODE_LOOPS(float, E4M3)
MOIETY_ENCODE_LOOPS(float, E5M2)
MOIETY_ENCODE_LOOPS(bf16, E2M1)
MOIETY_ENCODE_LOOPS(bf16, E4M3)
MOIETY_ENCODE_LOOPS(bf16, E5M2)
#undef MOIETY_ENCODE_LOOPS

}  // namespace

MOIETY_SIMD_CLONES void widen(const bf16* __restrict x, int64_t n, float* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i];
}

MOIETY_SIMD_CLONES uint32_t amax(const float* x, int64_t n) { return amax_of(x, n); }
MOIETY_SIMD_CLONES uint32_t amax(const bf16* x, int64_t n) { return amax_of(x, n); }
MOIETY_SIMD_CLONES uint32_t largest(const uint32_t* amax, int64_t n) {
  uint32_t m = 0;
  for (int64_t i = 0; i < n; ++i) m = larger(m, amax[i]);
  return m;
}

MOIETY_SIMD_CLONES void block_amax(const float* x, int block, int64_t blocks, uint32_t* out) {
  amax_by_block(x, block, blocks, out);
}
MOIETY_SIMD_CLONES void block_amax(const bf16* x, int block, int64_t blocks, uint32_t* out) {
  amax_by_block(x, block, blocks, out);
}
MOIETY_SIMD_CLONES void column_amax(const float* x, int64_t stride, int64_t rows, uint32_t* out) {
  amax_of_columns(x, stride, rows, out);
}
MOIETY_SIMD_CLONES void column_amax(const bf16* x, int64_t stride, int64_t rows, uint32_t* out) {
  amax_of_columns(x, stride, rows, out);
}

MOIETY_SIMD_CLONES void fp8_scales(const uint32_t* __restrict amax, int64_t n, float fp8_max,
                                   float amax_floor, bool pow2, float* __restrict factor,
                                   float* __restrict scale) {
  for (int64_t i = 0; i < n; ++i) {
    const Fp8Scale s = fp8_scale(std::bit_cast<float>(amax[i]), fp8_max, amax_floor, pow2);
    factor[i] = s.encode;
    scale[i] = s.decode;
  }
}
MOIETY_SIMD_CLONES void mxfp8_scales(const uint32_t* amax, int64_t n, bool e5m2, float* factor,
                                     uint8_t* scale) {
  e5m2 ? mxfp8_blocks<E5M2>(amax, n, factor, scale) : mxfp8_blocks<E4M3>(amax, n, factor, scale);
}
MOIETY_SIMD_CLONES void nvfp4_scales(const uint32_t* __restrict amax, int64_t n,
                                     const Nvfp4TensorScale& tensor, float* __restrict factor,
                                     uint8_t* __restrict scale) {
  const Nvfp4TensorScale t = tensor;
  for (int64_t i = 0; i < n; ++i) {
    const Nvfp4BlockScale s = nvfp4_block_scale(std::bit_cast<float>(amax[i]), t);
    factor[i] = s.encode;
    scale[i] = s.code;
  }
}
MOIETY_SIMD_CLONES void spread(const float* factor, int block, int64_t blocks, float* out) {
  if (block == 16) spread_blocks<16>(factor, blocks, out);
  if (block == 32) spread_blocks<32>(factor, blocks, out);
  if (block == 128) spread_blocks<128>(factor, blocks, out);
}

Encode encode(DType input, DType element, bool stochastic) {
  const bool wide = input == DType::kFloat32;
  switch (element) {
    case DType::kE2M1:
      return stochastic ? (wide ? stochastic_float_E2M1 : stochastic_bf16_E2M1)
                        : (wide ? nearest_float_E2M1 : nearest_bf16_E2M1);
    case DType::kE5M2:
      return stochastic ? (wide ? stochastic_float_E5M2 : stochastic_bf16_E5M2)
                        : (wide ? nearest_float_E5M2 : nearest_bf16_E5M2);
    default:
      return stochastic ? (wide ? stochastic_float_E4M3 : stochastic_bf16_E4M3)
                        : (wide ? nearest_float_E4M3 : nearest_bf16_E4M3);
  }
}

MOIETY_SIMD_CLONES void pack_pairs(const uint8_t* __restrict codes, int64_t n,
                                   uint8_t* __restrict out) {
  for (int64_t i = 0; i < n / 2; ++i) out[i] = E2M1::pack(codes[2 * i], codes[2 * i + 1]);
}
MOIETY_SIMD_CLONES void pack_rows(const uint8_t* __restrict even, const uint8_t* __restrict odd,
                                  uint8_t* __restrict out) {
  for (int64_t c = 0; c < kPanel; ++c) out[c] = E2M1::pack(even[c], odd[c]);
}

MOIETY_SIMD_CLONES void rotate(float (&x)[16][kPanel], uint16_t signs) {
  for (auto& row : x) {
    for (float& v : row) v = bf16(v);
  }
  apply_rht(x, signs);
}

void transpose(const uint8_t* in, int64_t in_pitch, int64_t rows, int64_t cols, uint8_t* out,
               int64_t out_pitch) {
  transpose_bytes(in, in_pitch, rows, cols, out, out_pitch);
}

}  // namespace moiety::quant::loops
