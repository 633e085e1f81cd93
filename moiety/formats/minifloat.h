// What E2M1, E4M3 and E5M2 share. Magnitudes are whole numbers of steps; the step is
// 2^(e - kMantissa) in the binade 2^e, e at least kMinExponent, below which values are subnormal.
// Codes of ascending magnitudes are consecutive. Arithmetic on bits and selects alone, so that
// loops over elements vectorize; no result depends on a flush mode of subnormals.
#pragma once

#include "moiety/formats/fp32.h"

namespace moiety {

// kMaxBits: FP32 bits of the largest magnitude; kNanCode: what NaN of either sign becomes; kSign:
// the sign bit of a code.
template <int kMantissa, int kMinExponent, uint32_t kMaxBits, uint8_t kNanCode, uint8_t kSign>
struct Minifloat {
 private:
  static constexpr int kDropped = 23 - kMantissa;
  static constexpr int kSignShift = 31 - std::countr_zero(kSign);
  static constexpr uint32_t kMinBinade = static_cast<uint32_t>(127 + kMinExponent) << 23;

 public:
  static constexpr float kMax = std::bit_cast<float>(kMaxBits);
  static constexpr uint8_t kMaxCode =
      static_cast<uint8_t>((kMaxBits - kMinBinade + (1u << 23)) >> kDropped);
  static constexpr uint8_t kNan = kNanCode;

  // To nearest, ties to even; saturates.
  MOIETY_HD_INLINE static constexpr uint8_t encode(float x) {
    const uint32_t a = clamped(x);
    const uint32_t e = binade(a);
    // The last bit of |x| + 2^(e + kDropped) is worth one step, so the addition rounds. It leaves
    // the steps in the low bits, on top of the sign and of the code of 2^e less the steps of 2^e.
    const uint32_t magic = e + (static_cast<uint32_t>(kDropped) << 23) + first_code(e) + sign(x);
    return finish(x, std::bit_cast<float>(a) + std::bit_cast<float>(magic));
  }

  // Up or down by the random byte r8; values of the format stay. The largest magnitude that is at
  // most |x| + u steps, u = (2 r8 + 1) / 512; saturates. In units of a step all but the sum is
  // exact, so the sum rounds as fma(u, step, |x|).
  MOIETY_HD_INLINE static constexpr uint8_t encode_stochastic(float x, uint8_t r8) {
    const uint32_t a = clamped(x);
    const uint32_t e = binade(a);
    const float per_step = std::bit_cast<float>(((254u + kMantissa) << 23) - e);
    const float u = std::bit_cast<float>(0x3F804000u | static_cast<uint32_t>(r8) << 15) - 1.0f;
    const float steps = std::bit_cast<float>(a) * per_step + u;
    const uint32_t code = static_cast<uint32_t>(static_cast<int32_t>(steps)) + first_code(e);
    return finish(x, std::bit_cast<float>(code + sign(x)));
  }

 protected:
  // The value of a code; those past the largest magnitude go on as the others.
  MOIETY_HD_INLINE static constexpr float value(uint32_t code) {
    const uint32_t magnitude = (code & (kSign - 1u)) << kDropped;
    const float normal = std::bit_cast<float>(magnitude + (kMinBinade - (1u << 23)));
    const float subnormal =
        std::bit_cast<float>(magnitude + kMinBinade) - std::bit_cast<float>(kMinBinade);
    const float absolute = magnitude < (1u << 23) ? subnormal : normal;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(absolute) |
                                (code << kSignShift & (1u << 31)));
  }

 private:
  MOIETY_HD_INLINE static constexpr uint32_t clamped(float x) {
    const uint32_t a = abs_bits(x);
    return a < kMaxBits ? a : kMaxBits;
  }
  MOIETY_HD_INLINE static constexpr uint32_t sign(float x) {
    return std::bit_cast<uint32_t>(x) >> kSignShift & kSign;
  }
  MOIETY_HD_INLINE static constexpr uint32_t binade(uint32_t a) {
    const uint32_t e = a & 0x7F800000u;
    return e > kMinBinade ? e : kMinBinade;
  }
  // Code of 2^e less the steps of 2^e.
  MOIETY_HD_INLINE static constexpr uint32_t first_code(uint32_t e) {
    return (e >> kDropped) - (kMinBinade >> kDropped);
  }
  // The low byte, unless x is NaN. The select is one of floats so that vectorizers, which push the
  // narrowing to bytes up through integer operations, narrow once.
  MOIETY_HD_INLINE static constexpr uint8_t finish(float x, float code) {
    const float out = is_nan(x) ? std::bit_cast<float>(static_cast<uint32_t>(kNan)) : code;
    return static_cast<uint8_t>(std::bit_cast<uint32_t>(out));
  }
};

}  // namespace moiety
