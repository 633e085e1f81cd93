#include <bit>

#include "moiety/quant/convert/byte_transpose.h"
#include "moiety/quant/hadamard.h"
#include "moiety/quant/quantize/quantize_encode.h"
#include "moiety/quant/quantize/quantize_loops_avx2.h"

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
MOIETY_INLINE uint32_t amax_of(const void* input, int64_t n) {
  const T* __restrict x = static_cast<const T*>(input);
  Magnitude<T> m = 0;
  for (int64_t i = 0; i < n; ++i) m = larger(m, magnitude(x[i]));
  return fp32_bits(m);
}

template <int kBlock, class T>
MOIETY_INLINE void amax_of_blocks(const T* __restrict x, int64_t blocks, uint32_t* __restrict out) {
  for (int64_t b = 0; b < blocks; ++b) {
    Magnitude<T> m = 0;
    // If this loop were not unrolled, the loop around it would be vectorized instead, with
    // shuffles.
#pragma GCC unroll 1
    for (int i = 0; i < kBlock; ++i) m = larger(m, magnitude(x[b * kBlock + i]));
    out[b] = fp32_bits(m);
  }
}
template <class T>
MOIETY_INLINE void amax_by_block(const void* input, int block, int64_t blocks, uint32_t* out) {
  const T* x = static_cast<const T*>(input);
  if (block == 16) amax_of_blocks<16>(x, blocks, out);
  if (block == 32) amax_of_blocks<32>(x, blocks, out);
  if (block == 128) amax_of_blocks<128>(x, blocks, out);
}

template <class T>
MOIETY_INLINE void amax_of_columns(const Rows& rows, uint32_t* __restrict out) {
  alignas(64) Magnitude<T> m[kPanel] = {};
  for (int64_t r = 0; r < rows.rows; ++r) {
    const T* __restrict x = static_cast<const T*>(rows.row(r));
    for (int64_t c = 0; c < kPanel; ++c) m[c] = larger(m[c], magnitude(x[c]));
  }
  for (int64_t c = 0; c < kPanel; ++c) out[c] = fp32_bits(m[c]);
}

template <int kBlock>
MOIETY_INLINE void spread_blocks(const float* __restrict factor, int64_t blocks,
                                 float* __restrict out) {
  for (int64_t b = 0; b < blocks; ++b) {
#pragma GCC unroll 1
    for (int i = 0; i < kBlock / 2; ++i) out[b * (kBlock / 2) + i] = factor[b];
  }
}

template <class F>
MOIETY_INLINE void mxfp8_blocks(const uint32_t* __restrict amax, int64_t n,
                                float* __restrict factor, uint8_t* __restrict scale) {
  for (int64_t i = 0; i < n; ++i) scale[i] = mxfp8_scale<F>(std::bit_cast<float>(amax[i]));
  for (int64_t i = 0; i < n; ++i) factor[i] = UE8M0::inverse(scale[i]);
}

// The elements of a pair as BF16 has them.
struct Values {
  float even, odd;
};
MOIETY_INLINE Values values(const bf16* row, int64_t i) {
  const uint32_t w = reinterpret_cast<const Word32*>(row)[i];
  return {std::bit_cast<float>(w << 16), std::bit_cast<float>(w & 0xFFFF0000u)};
}
MOIETY_INLINE Values values(const float* row, int64_t i) {
  return {bf16(row[2 * i]), bf16(row[2 * i + 1])};
}

// Column pair i of 16 rows. Indices of rows are constants, so that columns are registers.
template <class T>
struct ColumnPair {
  float even[16], odd[16];

  template <int... kRow>
  MOIETY_INLINE void load(const Rows& rows, int64_t i, std::integer_sequence<int, kRow...>) {
    ((even[kRow] = values(static_cast<const T*>(rows.row(kRow)), i).even,
      odd[kRow] = values(static_cast<const T*>(rows.row(kRow)), i).odd),
     ...);
  }
  template <int... kRow>
  MOIETY_INLINE void store(bf16 (*y)[kPanel], int64_t i,
                           std::integer_sequence<int, kRow...>) const {
    ((reinterpret_cast<Word32*>(y[kRow])[i] =
          std::bit_cast<uint32_t>(even[kRow]) >> 16 | std::bit_cast<uint32_t>(odd[kRow])),
     ...);
  }
  template <int... kRow>
  MOIETY_INLINE uint32_t largest(std::integer_sequence<int, kRow...>) const {
    uint32_t m = 0;
    ((m = larger(m, larger(abs_bits(even[kRow]), abs_bits(odd[kRow])))), ...);
    return m;
  }
};

template <class T>
MOIETY_INLINE void rotate_columns(Rows rows, uint16_t signs, bf16 (*y)[kPanel]) {
#pragma GCC ivdep
  for (int64_t i = 0; i < kPanel / 2; ++i) {
    ColumnPair<T> w;
    w.load(rows, i, detail::Elements{});
    apply_rht(w.even, signs);
    apply_rht(w.odd, signs);
    w.store(y, i, detail::Elements{});
  }
}

// Rounding is monotone, so it may come after the maximum.
template <class T>
MOIETY_INLINE uint32_t amax_of_rotated(Rows rows, uint16_t signs) {
  uint32_t m = 0;
  for (int64_t i = 0; i < kPanel / 2; ++i) {
    ColumnPair<T> w;
    w.load(rows, i, detail::Elements{});
    rotate_unrounded(w.even, signs);
    rotate_unrounded(w.odd, signs);
    m = larger(m, w.largest(detail::Elements{}));
  }
  return abs_bits(bf16(std::bit_cast<float>(m)));
}

}  // namespace

MOIETY_SIMD_CLONES void round_to_bf16(const float* __restrict x, int64_t n, bf16* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = bf16(x[i]);
}

MOIETY_SIMD_CLONES uint32_t amax(DType dtype, const void* x, int64_t n) {
  return dtype == DType::kBFloat16 ? amax_of<bf16>(x, n) : amax_of<float>(x, n);
}
MOIETY_SIMD_CLONES uint32_t largest(const uint32_t* amax, int64_t n) {
  uint32_t m = 0;
  for (int64_t i = 0; i < n; ++i) m = larger(m, amax[i]);
  return m;
}
MOIETY_SIMD_CLONES void block_amax(DType dtype, const void* x, int block, int64_t blocks,
                                   uint32_t* out) {
  if (dtype == DType::kFloat32) return amax_by_block<float>(x, block, blocks, out);
  const bf16* from = static_cast<const bf16*>(x);
  const int64_t done = block_amax_avx2(from, block, blocks, out);
  amax_by_block<bf16>(from + done * block, block, blocks - done, out + done);
}
MOIETY_SIMD_CLONES void column_amax(const Rows& x, uint32_t* out) {
  x.dtype == DType::kBFloat16 ? amax_of_columns<bf16>(x, out) : amax_of_columns<float>(x, out);
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
MOIETY_SIMD_CLONES void split(const float* __restrict factor, int64_t n, float* __restrict even,
                              float* __restrict odd) {
  for (int64_t i = 0; i < n / 2; ++i) {
    even[i] = factor[2 * i];
    odd[i] = factor[2 * i + 1];
  }
}

MOIETY_SIMD_CLONES void rotate(const Rows& x, uint16_t signs, bf16 (*y)[kPanel], uint32_t* amax) {
  if (rotate_avx2(x, signs, y, amax)) return;
  x.dtype == DType::kBFloat16 ? rotate_columns<bf16>(x, signs, y)
                              : rotate_columns<float>(x, signs, y);
  amax_of_columns<bf16>({DType::kBFloat16, y, sizeof y[0], 16, kPanel}, amax);
}
MOIETY_SIMD_CLONES uint32_t rotated_amax(const Rows& x, uint16_t signs) {
  if (const std::optional<uint32_t> amax = rotated_amax_avx2(x, signs)) return *amax;
  return x.dtype == DType::kBFloat16 ? amax_of_rotated<bf16>(x, signs)
                                     : amax_of_rotated<float>(x, signs);
}

MOIETY_SIMD_CLONES void transpose(const uint8_t* in, uint8_t* out) {
  transpose_bytes(in, kPanel, kPanel, kPanel, out, kPanel);
}
MOIETY_SIMD_CLONES void transpose_nibbles(const uint8_t* in, uint8_t* out) {
  quant::transpose_nibbles(in, kPanel / 2, kPanel, kPanel, out, kPanel / 2);
}
MOIETY_SIMD_CLONES void transpose_16(const uint8_t* in, uint8_t* out) {
  transpose_bytes(in, kPanel, 16, kPanel, out, 16);
}

}  // namespace moiety::quant::loops
