// From codes to values on GPUs, with the hardware's conversions where they give the bits of the
// codecs (tests/quant_gpu).
#pragma once

#include <cstdint>

#include "moiety/formats/bf16.h"
#include "moiety/formats/e2m1.h"
#include "moiety/formats/e4m3.h"
#include "moiety/formats/e5m2.h"

namespace moiety::quant::device {

// Values of the two FP8 codes in the low half of `codes`. NaN are some NaN.
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

// Two values as bf16, the first in the low half: to nearest even, subnormals kept, NaN 0x7FFF.
__device__ inline uint32_t bf16_pair(float first, float second) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
  return out;
}

// n codes in registers.
template <class C, int n>
struct CodeRun {
  static constexpr bool kFp4 = C::kMaxCode == E2M1::kMaxCode;
  static constexpr int kBytes = kFp4 ? n / 2 : n;
  uint32_t word[(kBytes + 3) / 4] = {};

  // Those at p. `valid` of them exist; FP4 all do.
  __device__ void load(const uint8_t* p, int64_t valid) {
    constexpr int kWords = kBytes / 4;
    if constexpr (kWords > 0) {
      constexpr int kAccess = kBytes % 16 == 0 ? 16 : kBytes;
      if ((kFp4 || valid >= n) && reinterpret_cast<uintptr_t>(p) % kAccess == 0) {
        struct alignas(kAccess) Words {
          uint32_t word[kWords];
        };
        const Words all = *reinterpret_cast<const Words*>(p);
#pragma unroll
        for (int w = 0; w < kWords; ++w) word[w] = all.word[w];
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
      if (kFp4 || i < valid) word[i / 4] |= uint32_t{p[i]} << 8 * (i % 4);
    }
  }

  __device__ void decode(float (&v)[n]) const {
    if constexpr (kFp4) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        // Exponent and mantissa as those of a float32 that is 2^126 times too small.
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
};

// The first `valid` of n values to p.
template <int n>
__device__ void store_values(float* p, const float (&v)[n], int64_t valid) {
  if (valid >= n && reinterpret_cast<uintptr_t>(p) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < n; i += 4) {
      *reinterpret_cast<float4*>(p + i) = make_float4(canonical(v[i]), canonical(v[i + 1]),
                                                      canonical(v[i + 2]), canonical(v[i + 3]));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (i < valid) p[i] = canonical(v[i]);
  }
}
template <int n>
__device__ void store_values(bf16* p, const float (&v)[n], int64_t valid) {
  if (valid >= n && reinterpret_cast<uintptr_t>(p) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < n; i += 8) {
      *reinterpret_cast<uint4*>(p + i) =
          make_uint4(bf16_pair(v[i], v[i + 1]), bf16_pair(v[i + 2], v[i + 3]),
                     bf16_pair(v[i + 4], v[i + 5]), bf16_pair(v[i + 6], v[i + 7]));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (i < valid) p[i] = bf16(v[i]);
  }
}

}  // namespace moiety::quant::device
