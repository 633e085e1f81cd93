// Parts that the quantization kernels share: the amax of units of sixteen elements, and their
// codes. The arithmetic is that of scale_math.h, rounding.h, hadamard.h and the codecs; the code
// here uses the hardware's conversions where they give the same bits (tests/quant_gpu).
#pragma once

#include <cstdint>

#include "moiety/formats/e2m1.h"
#include "moiety/formats/e4m3.h"
#include "moiety/formats/e5m2.h"
#include "moiety/quant/quantize/quantize_memory.cuh"
#include "moiety/quant/rounding.h"

namespace moiety::quant::device {

// Bits of the largest magnitude of a unit.
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

// A value that is the same in all lanes of a warp, as a uniform register. All lanes call it.
__device__ inline uint32_t uniform(uint32_t v) { return __reduce_or_sync(0xFFFFFFFFu, v); }

// RandomStream::block for kernels: a thread adds up the round keys once, and a product of 32 x 32
// bits is one instruction.
class DeviceRandom {
 public:
  DeviceRandom() = default;
  __device__ explicit DeviceRandom(const RandomStream& s) : stream_(s) {
    for (uint32_t& word : stream_.key) word = uniform(word);
  }
  __device__ PhiloxBlock block(uint64_t b) const {
    PhiloxKey key = stream_.key;
    PhiloxBlock c = {uint32_t(b), (uint32_t(b >> 32) & 0x7FFFu) | stream_.upper, stream_.tensor_id,
                     stream_.draw};
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      uint32_t low[2], high[2];
      multiply(kPhiloxMultiplier0, c[0], &low[0], &high[0]);
      multiply(kPhiloxMultiplier2, c[2], &low[1], &high[1]);
      c = {high[1] ^ c[1] ^ key[0], low[1], high[0] ^ c[3] ^ key[1], low[0]};
      key = next_round_key(key);
    }
    return c;
  }

 private:
  static __device__ void multiply(uint32_t a, uint32_t b, uint32_t* low, uint32_t* high) {
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(b), "r"(a));
    *low = uint32_t(product);
    *high = uint32_t(product >> 32);
  }
  RandomStream stream_;
};

// E2M1 without a conversion instruction. Sums near 2^23 and 2^24 round to a step, ties to even, and
// to twice that from the power of two on, so their bits count codes: `fine` counts codes up to 4,
// `coarse` from 2 on. Outside these ranges both are too large, so the code is the smaller one.
constexpr int kE2m1Base = 0x4AFFFFFC;  // bits of 2^23 - 2
// kE2m1Base + the code of |x|; |x| is less than 7.
__device__ inline int count_e2m1(float x) {
  // steps of 0.5, from 2 on of 1
  const int fine = __float_as_int(__fadd_rn(fabsf(x), 0x1p23f - 2.0f));
  // steps of 1, from 4 on of 2
  const int coarse = __float_as_int(__fadd_rn(fabsf(x), 0x1p24f - 4.0f));
  constexpr int kCoarseBase = 0x4B7FFFFC - 2;
  return __viaddmin_s32(coarse, kE2m1Base - kCoarseBase, fine);
}
__device__ inline uint32_t encode_e2m1(float x) {
  // NaN gets the code of 6
  const uint32_t code = count_e2m1(fminf(fabsf(x), E2M1::kMax)) - kE2m1Base;
  return code | (__float_as_uint(x) >> 28 & 8u);
}

// Rounds up or down by random bytes. It is Minifloat::encode_stochastic on the bits of |x|, which
// grow by one step from code to code. Below the least normal magnitude the bits of |x| plus that
// magnitude do.
template <class F>
struct StochasticCode {
  static constexpr int kShift = F::kMantissaBits + 1;  // puts codes into the top byte
  static constexpr uint32_t kOne = 1u << 23;           // from one binade to the next

  // The code of |x| in the top byte; past the largest magnitude the sequence of codes continues.
  // The bits below are the part that was cut off.
  static __device__ uint32_t of(float x, uint32_t random, int byte) {
    constexpr uint32_t kLeastNormal = std::bit_cast<uint32_t>(F::kLeastNormal);
    // The reference rounds |x| + u steps. That carries it to a value of the format only at one
    // step, by up to 2^-25 steps.
    constexpr uint32_t kCarry = kLeastNormal - kOne * (F::kMantissaBits + 25);
    const float a = __fadd_rz(fabsf(x), __uint_as_float(kCarry));
    const int subnormal = __float_as_int(__fadd_rz(a, F::kLeastNormal));
    const uint32_t level = __viaddmax_s32(subnormal, -int(kOne), __float_as_int(a));
    // (2 r8 + 1) / 512 steps, minus the level of code 0.
    constexpr uint32_t kRest = 0x8000u - (kLeastNormal - kOne << kShift);
    static_assert((kRest & 0x00FF00FFu) == 0);
    return (level << kShift) + __byte_perm(random, kRest, 0x7054u | byte << 8);
  }
};

// The top bytes of four words.
__device__ inline uint32_t top_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0073), __byte_perm(c, d, 0x0073), 0x5410);
}
// The signs of elements i to i + 3, in the top bits of the bytes.
template <class T>
__device__ uint32_t sign_bytes(const Unit<T>& x, int i) {
  if constexpr (sizeof(T) == 4) {
    return top_bytes(x.word[i], x.word[i + 1], x.word[i + 2], x.word[i + 3]);
  } else {
    return __byte_perm(x.word[i / 2], x.word[i / 2 + 1], 0x7531);
  }
}

template <class F>
struct Encoder;

template <class F>
struct Fp8Encoder {
  static constexpr int kBytes = 16;
  template <class T>
  static __device__ Codes nearest(const Unit<T>& x, float factor, uint32_t) {
    Codes out;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t low = encode_pair<F>(x[4 * w] * factor, x[4 * w + 1] * factor);
      const uint32_t high = encode_pair<F>(x[4 * w + 2] * factor, x[4 * w + 3] * factor);
      out.word[w] = low | high << 16;
    }
    return out;
  }
  // kBounded says that no product exceeds F::kMax by a 2^-20th of it or more, and that all are
  // numbers if the factor is one.
  template <bool kBounded, class T>
  static __device__ Codes stochastic(const Unit<T>& x, float factor, uint32_t,
                                     const PhiloxBlock& bits) {
    Codes out;
    float nan = factor;  // becomes NaN if one of the products is
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t code[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float y = x[4 * w + i] * factor;
        if constexpr (!kBounded) {
          nan = __fmaf_rn(y, 0.0f, nan);
          y = fminf(fabsf(y), F::kMax);
        }
        code[i] = StochasticCode<F>::of(y, bits[w], i);
      }
      out.word[w] =
          top_bytes(code[0], code[1], code[2], code[3]) | (sign_bytes(x, 4 * w) & 0x80808080u);
    }
    if (is_nan(nan)) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if (is_nan(x[i] * factor)) {
          const uint32_t byte = 0xFFu << 8 * (i % 4);
          out.word[i / 4] = (out.word[i / 4] & ~byte) | (F::kNan * 0x01010101u & byte);
        }
      }
    }
    return out;
  }
};
template <>
struct Encoder<E4M3> : Fp8Encoder<E4M3> {};
template <>
struct Encoder<E5M2> : Fp8Encoder<E5M2> {};

// The factor is NaN if an element is not finite.
template <>
struct Encoder<E2M1> {
  static constexpr int kBytes = 8;
  static constexpr uint32_t kAllNan = E2M1::kNan * 0x11111111u;

  // `amax` is the bits of a magnitude that no element exceeds.
  template <class T>
  static __device__ Codes nearest(Unit<T> x, float factor, uint32_t amax) {
    clamp(&x, factor, amax);
    Codes out;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      uint32_t code = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        code += uint32_t(count_e2m1(x[8 * w + i] * factor)) << 4 * i;
      }
      out.word[w] = with_signs(code - kE2m1Base * 0x11111111u, x, w, factor);
    }
    return out;
  }
  template <bool kBounded, class T>
  static __device__ Codes stochastic(Unit<T> x, float factor, uint32_t amax,
                                     const PhiloxBlock& bits) {
    clamp(&x, factor, amax);
    Codes out;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      uint32_t code[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        code[i] = StochasticCode<E2M1>::of(x[8 * w + i] * factor, bits[2 * w + i / 4], i % 4);
      }
      const uint32_t even = top_bytes(code[0], code[2], code[4], code[6]);
      const uint32_t odd = top_bytes(code[1], code[3], code[5], code[7]);
      const uint32_t all = even + (odd << 4);  // each is at most 8, which must become 7
      out.word[w] = with_signs(all - (all >> 3 & 0x11111111u), x, w, factor);
    }
    return out;
  }

 private:
  // Products of 7 or more, if there are any, become about 6.9, which has the same code.
  template <class T>
  static __device__ void clamp(Unit<T>* x, float factor, uint32_t amax) {
    if (__uint_as_float(amax) * factor < 7) return;
    float inverse;
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(factor));
    const uint32_t limit = __float_as_uint(6.9f * inverse);
#pragma unroll
    for (uint32_t& word : x->word) {
      if constexpr (sizeof(T) == 4) {
        word = min(word & 0x7FFFFFFFu, limit) | (word & 0x80000000u);
      } else {
        word = __vminu2(word & 0x7FFF7FFFu, __byte_perm(limit, 0, 0x3232)) | (word & 0x80008000u);
      }
    }
  }
  // Eight codes of magnitudes with the signs of their elements.
  template <class T>
  static __device__ uint32_t with_signs(uint32_t codes, const Unit<T>& x, int w, float factor) {
    const uint32_t low = sign_bytes(x, 8 * w), high = sign_bytes(x, 8 * w + 4);
    const uint32_t even = __byte_perm(low, high, 0x6420), odd = __byte_perm(low, high, 0x7531);
    const uint32_t signs = (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
    return is_nan(factor) ? kAllNan : codes | signs;
  }
};

// The maximum over lanes whose numbers differ only in these bits.
template <int kMask>
__device__ uint32_t lane_max(uint32_t v) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    if (kMask & bit) v = max(v, __shfl_xor_sync(0xFFFFFFFFu, v, bit));
  }
  return v;
}

}  // namespace moiety::quant::device
