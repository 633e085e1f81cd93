// Packing of bf16 operands as pairs of steps of the reduction, for processors whose instructions
// multiply such pairs (AVX512-BF16, AMX). kEvenUpper: the even step is the upper half of a pair, which
// AVX512-BF16 adds first; otherwise pairs are what lies in memory. Internal to this folder.
#pragma once

#include <algorithm>
#include <array>
#include <immintrin.h>
#include <vector>

#include "moiety/base/integer.h"
#include "moiety/gemm/gemm_block.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512vl,avx512bw,avx512dq,avx512bf16")
namespace moiety::gemm::pairs {

inline constexpr int64_t kLanes = 16;
inline constexpr int64_t kPanel = 2 * kLanes;

using Pair = uint32_t;  // steps p and p + 1 of the reduction

// The scratch of a thread, which grows to what its blocks need.
template <class T>
struct Scratch {
  std::vector<T> storage;
  T* get(int64_t n) {
    if (static_cast<int64_t>(storage.size()) < n + 16) storage.resize(n + 16);
    const auto address = reinterpret_cast<uintptr_t>(storage.data());
    return reinterpret_cast<T*>((address + 63) / 64 * 64);
  }
};

// Loads up to 32 elements, then zeros.
MOIETY_INLINE __m512i load32(const bf16* row, int64_t n) {
  if (n >= 32) return _mm512_loadu_si512(row);
  return _mm512_maskz_loadu_epi16((__mmask32{1} << n) - 1, row);
}

// Packs up to kPanel columns of two steps as pairs; a null step is zeros.
template <bool kEvenUpper>
MOIETY_INLINE void pack_steps(const bf16* even, const bf16* odd, int64_t n, Pair* out) {
  alignas(64) static constexpr auto kIndex = [] {
    std::array<uint16_t, 64> index{};
    for (int i = 0; i < 32; ++i) {
      index[2 * i] = static_cast<uint16_t>(i);
      index[2 * i + 1] = static_cast<uint16_t>(32 + i);
    }
    return index;
  }();
  const bf16* const upper_step = kEvenUpper ? even : odd;
  const bf16* const lower_step = kEvenUpper ? odd : even;
  const __m512i upper = upper_step ? load32(upper_step, n) : _mm512_setzero_si512();
  const __m512i lower = lower_step ? load32(lower_step, n) : _mm512_setzero_si512();
  const __m512i first = _mm512_load_si512(kIndex.data());
  const __m512i second = _mm512_load_si512(kIndex.data() + 32);
  _mm512_storeu_si512(out, _mm512_permutex2var_epi16(lower, first, upper));
  _mm512_storeu_si512(out + kLanes, _mm512_permutex2var_epi16(lower, second, upper));
}

// Loads up to 32 steps of a row as pairs, then zeros.
template <bool kEvenUpper>
MOIETY_INLINE __m512i load_pairs(const bf16* row, int64_t n) {
  const __m512i pairs = load32(row, n);
  return kEvenUpper ? _mm512_rol_epi32(pairs, 16) : pairs;
}

// x[j] lane i = x[i] lane j.
MOIETY_INLINE void transpose16(__m512i (&x)[16]) {
  __m512i pair[16], quad[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pair[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    pair[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    quad[i] = _mm512_unpacklo_epi64(pair[i], pair[i + 2]);
    quad[i + 1] = _mm512_unpackhi_epi64(pair[i], pair[i + 2]);
    quad[i + 2] = _mm512_unpacklo_epi64(pair[i + 1], pair[i + 3]);
    quad[i + 3] = _mm512_unpackhi_epi64(pair[i + 1], pair[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i even0 = _mm512_shuffle_i32x4(quad[c], quad[4 + c], 0x88);
    const __m512i even1 = _mm512_shuffle_i32x4(quad[8 + c], quad[12 + c], 0x88);
    const __m512i odd0 = _mm512_shuffle_i32x4(quad[c], quad[4 + c], 0xDD);
    const __m512i odd1 = _mm512_shuffle_i32x4(quad[8 + c], quad[12 + c], 0xDD);
    x[c] = _mm512_shuffle_i32x4(even0, even1, 0x88);
    x[4 + c] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
    x[8 + c] = _mm512_shuffle_i32x4(even0, even1, 0xDD);
    x[12 + c] = _mm512_shuffle_i32x4(odd0, odd1, 0xDD);
  }
}

// Packs up to 32 steps of kLanes rows of b, whose columns are the reduction, as columns of a panel.
// kSteps: that many, otherwise `k`.
template <bool kEvenUpper, int kSteps>
MOIETY_INLINE void pack_rows(const bf16* const (&rows)[kLanes], int64_t p, int64_t k, Pair* out) {
  const int64_t steps = kSteps > 0 ? kSteps : k;
  __m512i x[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) x[i] = load_pairs<kEvenUpper>(rows[i] + p, steps);
  transpose16(x);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (2 * i < steps) _mm512_storeu_si512(out + i * kPanel, x[i]);
  }
}

template <bool kEvenUpper>
void pack_rows(const bf16* const (&rows)[kLanes], int64_t k, Pair* out) {
  int64_t p = 0;
  for (; p + 32 <= k; p += 32) pack_rows<kEvenUpper, 32>(rows, p, 32, out + p / 2 * kPanel);
  if (p < k) pack_rows<kEvenUpper, 0>(rows, p, k - p, out + p / 2 * kPanel);
}

// Packs columns [j0, j0 + n) of b as panels [pairs][kPanel], one after another; `pairs` may be more
// than the reduction has, of which the last are zeros. Columns past the end hold anything, since
// their products are not stored.
template <bool kEvenUpper>
void pack_b(const Product& g, int64_t j0, int64_t n, int64_t pairs, Pair* out) {
  const int64_t live = ceil_div(g.k, int64_t{2});
  for (int64_t j = 0; j < n; j += kPanel) {
    std::fill(out + j * pairs + live * kPanel, out + (j + kPanel) * pairs, Pair{0});
  }
  if (g.op == GemmOp::kTN) {
    for (int64_t j = 0; j < n; j += kLanes) {
      const bf16* rows[kLanes];
      for (int64_t x = 0; x < kLanes; ++x) rows[x] = g.b.row<bf16>(j0 + std::min(j + x, n - 1));
      pack_rows<kEvenUpper>(rows, g.k, out + j / kPanel * kPanel * pairs + j % kPanel);
    }
    return;
  }
  for (int64_t p = 0; p < live; ++p) {
    const bf16* even = g.b.row<bf16>(2 * p);
    const bf16* odd = 2 * p + 1 < g.k ? g.b.row<bf16>(2 * p + 1) : nullptr;
    for (int64_t j = 0; j < n; j += kPanel) {
      pack_steps<kEvenUpper>(even ? even + j0 + j : nullptr, odd ? odd + j0 + j : nullptr, n - j,
                             out + (j * pairs + p * kPanel));
    }
  }
}

}  // namespace moiety::gemm::pairs
#pragma GCC pop_options
