// Codes to values on GPUs, with the hardware's conversions where they give the bits of the codecs
// (tests/quant_gpu).
#pragma once

#include <cstdint>

#include "moiety/formats/e2m1.h"
#include "moiety/formats/e4m3.h"
#include "moiety/formats/e5m2.h"
#include "moiety/formats/octet.cuh"
#include "moiety/quant/quantize/quantize_memory.cuh"

namespace moiety::quant::device {

// The values of the two FP8 codes in the low half of `codes`. A NaN may be any NaN.
template <class F>
__device__ float2 decode_pair(uint32_t codes) {
  uint32_t halves;
  if constexpr (F::kMaxCode == E4M3::kMaxCode) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(codes)));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(codes)));
  }
  float2 out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out.x) : "h"(uint16_t(halves)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(out.y) : "h"(uint16_t(halves >> 16)));
  return out;
}

// The alignment of a matrix's rows. kVectors: codes and stores of a thread are aligned to their
// size. kWords: codes are aligned to words and values to eight bytes, as with columns that are a
// multiple of four. kBytes: neither.
enum class Rows { kVectors, kWords, kBytes };

// n bytes of a row, loaded in one go.
template <int n, Rows kRows>
struct ByteRun {
  static constexpr int kWords = (n + 3) / 4;
  Window<kWords> window;

  __device__ void load(const uint8_t* p, const ByteRange& all) {
    if constexpr (n < 4) {
      window.raw[0] = *reinterpret_cast<const uint16_t*>(p);
    } else if constexpr (kRows == Rows::kVectors) {
      const auto v = *reinterpret_cast<const Vector<kWords>*>(p);
#pragma unroll
      for (int w = 0; w < kWords; ++w) window.raw[w] = v.word[w];
    } else if constexpr (kRows == Rows::kWords) {
      // Words of the last run that do not exist are loaded from the last one: a branch would make
      // every load wait for the one before it.
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint8_t* q = p + 4 * w < all.end ? p + 4 * w : all.end - 4;
        window.raw[w] = *reinterpret_cast<const uint32_t*>(q);
      }
    } else {
      window.load(p, all);
    }
  }
  __device__ void words(uint32_t (&out)[kWords]) const {
    if constexpr (kRows == Rows::kBytes) {
      window.words(out);
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) out[w] = window.raw[w];
    }
  }
};

// The values of n codes, which lie in words.
template <class C, int n, int kWords>
__device__ void decode(const uint32_t (&word)[kWords], float (&v)[n]) {
  if constexpr (C::kMaxCode == E2M1::kMaxCode) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      // Exponent and mantissa are placed as those of a float32 that is 2^126 times too small.
      const uint32_t code = word[i / 8] >> 4 * (i % 8);
      v[i] = __uint_as_float((code & 7u) << 22 | (code & 8u) << 28) * 0x1p126f;
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      const float2 pair = decode_pair<C>(word[i / 4] >> 8 * (i % 4));
      v[i] = pair.x;
      v[i + 1] = pair.y;
    }
  }
}

__device__ inline uint32_t multiply_bf16_pairs(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// Eight E2M1 codes times an E4M3 scale, exact in bf16. It works as above, but with codes 4 apart
// side by side.
__device__ inline void scaled_e2m1(uint32_t codes, float scale, uint32_t (&out)[4]) {
  constexpr uint32_t kBack = 0x7E807E80;  // 2^126
  const uint32_t scales = __byte_perm(__float_as_uint(scale), 0, 0x3232);
  uint32_t v[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t magnitude = k < 2 ? codes << (6 - 4 * k) : codes >> (4 * k - 6);
    const uint32_t bits = (magnitude & 0x01C001C0u) | (codes << (12 - 4 * k) & 0x80008000u);
    v[k] = multiply_bf16_pairs(multiply_bf16_pairs(bits, kBack), scales);
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    out[k] = __byte_perm(v[k % 2 * 2], v[k % 2 * 2 + 1], k < 2 ? 0x5410 : 0x7632);
  }
}

// Packs sixteen bytes of values, from v[first] on.
template <class T, int n>
__device__ void pack_values(const float (&v)[n], int first, uint32_t (&out)[4]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (sizeof(T) == 4) {
      out[w] = __float_as_uint(canonical(v[first + w]));
    } else {
      out[w] = bf16_word(v[first + 2 * w], v[first + 2 * w + 1]);
    }
  }
}

// Stores sixteen bytes from each lane to a run that begins at p, the lane's own place, aligned to
// eight: whole vectors except at the ends of the run. All lanes of a warp call it. It writes with
// __stwb, since the compiler joins plain stores of the branches and then splits them into words.
__device__ inline void store_half_vectors(uint8_t* p, const uint32_t (&mine)[4]) {
  if (reinterpret_cast<uintptr_t>(p) % 16 == 0) {
    __stwb(reinterpret_cast<uint4*>(p), make_uint4(mine[0], mine[1], mine[2], mine[3]));
    return;
  }
  const uint32_t next[] = {__shfl_down_sync(kWarp, mine[0], 1),
                           __shfl_down_sync(kWarp, mine[1], 1)};
  const int lane = threadIdx.x % 32;
  if (lane == 0) __stwb(reinterpret_cast<uint2*>(p), make_uint2(mine[0], mine[1]));
  if (lane < 31) {
    __stwb(reinterpret_cast<uint4*>(p + 8), make_uint4(mine[2], mine[3], next[0], next[1]));
  } else {
    __stwb(reinterpret_cast<uint2*>(p + 8), make_uint2(mine[2], mine[3]));
  }
}

// Stores the first `bytes` (perhaps <= 0) of sixteen bytes to p.
template <Rows kRows>
__device__ void store_run_of_lane(uint8_t* p, const uint32_t (&word)[4], int64_t bytes) {
  constexpr int kEach = kRows == Rows::kVectors ? 4 : 2;  // words of a store
#pragma unroll
  for (int w = 0; w < 4; w += kEach) {
    Vector<kEach> part;
#pragma unroll
    for (int i = 0; i < kEach; ++i) part.word[i] = word[w + i];
    if (kRows != Rows::kBytes && bytes >= 4 * (w + kEach)) {
      *reinterpret_cast<Vector<kEach>*>(p + 4 * w) = part;
    } else {
      store_bytes(p + 4 * w, part.word, bytes - 4 * w);
    }
  }
}

}  // namespace moiety::quant::device
