// What the quantization kernels share: units of sixteen elements in registers, their amax, and
// their codes. The arithmetic is that of scale_math.h, rounding.h, hadamard.h and the codecs; what
// is here takes the hardware's conversions where they give the same bits (tests/quant_gpu).
#pragma once

#include <cstdint>

#include "moiety/formats/bf16.h"
#include "moiety/formats/e2m1.h"
#include "moiety/formats/e4m3.h"
#include "moiety/formats/e5m2.h"
#include "moiety/quant/rounding.h"

namespace moiety::quant::device {

constexpr int kUnit = 16;  // elements of a row that one thread holds: a block of NVFP4

// Elements as they lie in memory: two bf16 or one float32 a word.
template <class T>
struct Unit {
  static constexpr int kWords = kUnit * int(sizeof(T)) / 4;
  uint32_t word[kWords];

  __device__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word[i]);
    } else {
      return __uint_as_float(i % 2 ? word[i / 2] & 0xFFFF0000u : word[i / 2] << 16);
    }
  }
};

// Bits of the largest magnitude.
template <class T>
__device__ uint32_t amax_bits(const Unit<T>& x) {
  uint32_t m = 0;
#pragma unroll
  for (int i = 0; i < Unit<T>::kWords; ++i) {
    if constexpr (sizeof(T) == 4) {
      m = max(m, x.word[i] & 0x7FFFFFFFu);
    } else {
      m = __vmaxu2(m, x.word[i] & 0x7FFF7FFFu);
    }
  }
  if constexpr (sizeof(T) == 4) return m;
  return max(m & 0xFFFF0000u, m << 16);
}

// The unit at p, of which `valid` (perhaps <= 0) elements exist; the others are +0. `vector`: p is
// aligned to 16 bytes.
template <class T>
__device__ Unit<T> load_unit(const T* p, int64_t valid, bool vector) {
  Unit<T> out;
  if (valid >= kUnit && vector) {
    const uint4* from = reinterpret_cast<const uint4*>(p);
#pragma unroll
    for (int i = 0; i < Unit<T>::kWords / 4; ++i) {
      const uint4 v = __ldg(from + i);
      out.word[4 * i] = v.x;
      out.word[4 * i + 1] = v.y;
      out.word[4 * i + 2] = v.z;
      out.word[4 * i + 3] = v.w;
    }
    return out;
  }
#pragma unroll
  for (int i = 0; i < Unit<T>::kWords; ++i) {
    if constexpr (sizeof(T) == 4) {
      out.word[i] = i < valid ? __float_as_uint(p[i]) : 0;
    } else {
      const uint32_t low = 2 * i < valid ? p[2 * i].bits : 0;
      const uint32_t high = 2 * i + 1 < valid ? p[2 * i + 1].bits : 0;
      out.word[i] = low | high << 16;
    }
  }
  return out;
}

// Two FP8 codes, the first in the low byte. Saturates; NaN gives 0x7F.
template <class F>
__device__ uint32_t encode_pair(float first, float second) {
  uint16_t codes;
  if constexpr (F::kMaxCode == E4M3::kMaxCode) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  }
  return codes;
}

// E2M1 without a conversion instruction. The code is a concave function of the magnitude: the least
// of what each binade's step gives. Sums near 2^23 round to whole steps, ties to even.
__device__ inline uint32_t encode_e2m1(float x) {
  const float a = fabsf(x);
  const int low = __float_as_int(__fmaf_rn(a, 2.0f, 0x1p23f));          // steps of 0.5
  const int middle = __float_as_int(__fadd_rn(a, 0x1p23f + 2.0f));      // of 1
  const int high = __float_as_int(__fmaf_rn(a, 0.5f, 0x1p23f + 4.0f));  // of 2
  constexpr int kSix = 0x4B000007;                                      // 2^23 + 7
  const int code = min(min(low, middle), min(high, kSix));
  return (uint32_t(code) & 7u) | (__float_as_uint(x) >> 28 & 8u);
}

// Codes of sixteen values in order: 16 bytes, or 8 with two codes a byte.
struct Codes {
  uint32_t word[4];
};

template <class F>
struct Encoder;

template <class F>
struct Fp8Encoder {
  static constexpr int kBytes = 16;
  template <class Values>
  static __device__ Codes nearest(const Values& x, float factor) {
    Codes out;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t low = encode_pair<F>(x[4 * w] * factor, x[4 * w + 1] * factor);
      const uint32_t high = encode_pair<F>(x[4 * w + 2] * factor, x[4 * w + 3] * factor);
      out.word[w] = low | high << 16;
    }
    return out;
  }
  template <class Values>
  static __device__ Codes stochastic(const Values& x, float factor, const PhiloxBlock& bits) {
    Codes out{};
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const uint32_t code = F::encode_stochastic(x[i] * factor, random_byte(bits, i));
      out.word[i / 4] |= code << 8 * (i % 4);
    }
    return out;
  }
};
template <>
struct Encoder<E4M3> : Fp8Encoder<E4M3> {};
template <>
struct Encoder<E5M2> : Fp8Encoder<E5M2> {};

template <>
struct Encoder<E2M1> {
  static constexpr int kBytes = 8;
  template <class Values>
  static __device__ Codes nearest(const Values& x, float factor) {
    Codes out{};
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      out.word[i / 8] |= encode_e2m1(x[i] * factor) << 4 * (i % 8);
    }
    return out;
  }
  template <class Values>
  static __device__ Codes stochastic(const Values& x, float factor, const PhiloxBlock& bits) {
    Codes out{};
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const uint32_t code = E2M1::encode_stochastic(x[i] * factor, random_byte(bits, i));
      out.word[i / 8] |= code << 4 * (i % 8);
    }
    return out;
  }
};

// Keeps the first `valid` codes; the others become 0.
template <int kBytes>
__device__ void clear_past(Codes* codes, int64_t valid) {
  constexpr int kBits = kBytes / 2;  // of a code: 8 or 4
#pragma unroll
  for (int w = 0; w < kBytes / 4; ++w) {
    const int64_t keep = valid - w * (32 / kBits);
    if (keep <= 0) {
      codes->word[w] = 0;
    } else if (keep < 32 / kBits) {
      codes->word[w] &= (1u << kBits * int(keep)) - 1;
    }
  }
}

// `bytes` of them (at most kBytes) to p. `vector`: p is aligned to kBytes.
template <int kBytes>
__device__ void store_codes(uint8_t* p, const Codes& codes, int64_t bytes, bool vector) {
  if (bytes >= kBytes && vector) {
    if constexpr (kBytes == 16) {
      *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(codes.word);
    } else {
      *reinterpret_cast<uint2*>(p) = make_uint2(codes.word[0], codes.word[1]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (i < bytes) p[i] = uint8_t(codes.word[i / 4] >> 8 * (i % 4));
  }
}

// Maximum over lanes that differ in these bits of their number.
template <int kMask>
__device__ uint32_t lane_max(uint32_t v) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    if (kMask & bit) v = max(v, __shfl_xor_sync(0xFFFFFFFFu, v, bit));
  }
  return v;
}

}  // namespace moiety::quant::device
