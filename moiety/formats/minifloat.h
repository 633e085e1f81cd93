// The common codec of E2M1, E4M3 and E5M2. Magnitudes are whole numbers of steps; the step is 2^(e
// - kMantissa) in the binade 2^e, with e at least kMinExponent, below which values are subnormal.
// Codes of ascending magnitudes are consecutive. The codec uses only arithmetic on bits and
// selects, so that loops over elements vectorize; no result depends on how the machine flushes
// subnormals.
#pragma once

#include <type_traits>

#include "moiety/formats/fp32.h"

namespace moiety {

// kMaxBits: FP32 bits of the largest magnitude; kNanCode: the code of NaN of either sign; kSign:
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
  static constexpr uint8_t kNan = kNanCode, kSignBit = kSign;
  static constexpr int kMantissaBits = kMantissa;
  static constexpr float kLeastNormal = std::bit_cast<float>(kMinBinade);

  // Rounds to nearest, ties to even; saturates.
  MOIETY_HD_INLINE static constexpr uint8_t encode(float x) {
    return finish(x, rounded<float>(clamped(abs_bits(x)), sign(x)));
  }

  // Rounds up or down by the random byte r8; values of the format stay. The result is the largest
  // magnitude that is at most |x| + u steps, u = (2 r8 + 1) / 512; it saturates. In units of a step
  // everything but the sum is exact, so the sum rounds as fma(u, step, |x|).
  MOIETY_HD_INLINE static constexpr uint8_t encode_stochastic(float x, uint8_t r8) {
    return finish(x,
                  std::bit_cast<float>(cut<float>(clamped(abs_bits(x)), uint32_t{r8}) + sign(x)));
  }

  // The same for magnitudes, x >= 0: the code is in the low 16 bits, the bits above mean nothing.
  // For loops that know that there is no NaN and move signs themselves; Word and Float may be
  // vectors.
  template <class Word = uint32_t, class Float = float>
  MOIETY_HD_INLINE static constexpr Word encode_magnitude(Float x) {
    return std::bit_cast<Word>(rounded<Float>(clamped(std::bit_cast<Word>(x)), Word{}));
  }
  template <class Word = uint32_t, class Float = float>
  MOIETY_HD_INLINE static constexpr Word encode_magnitude_stochastic(Float x, Word r8) {
    return cut<Float>(clamped(std::bit_cast<Word>(x)), r8);
  }

  // The value of the code in the low bits; codes past the largest magnitude continue the sequence.
  MOIETY_HD_INLINE static constexpr float decode_finite(uint32_t code) {
    const uint32_t magnitude = (code & (kSign - 1u)) << kDropped;
    // `normal` has the implied bit, which is too much for subnormals. `subnormal` is twice that
    // less the least normal value: right for subnormals, and at least `normal` elsewhere. So the
    // smaller one is right. Neither is negative, so their bits compare as they do.
    const uint32_t normal = magnitude + (kMinBinade - (1u << 23));
    const auto subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude + kMinBinade) -
                                                   std::bit_cast<float>(kMinBinade));
    const uint32_t absolute = subnormal < normal ? subnormal : normal;
    return std::bit_cast<float>(absolute | (code << kSignShift & (1u << 31)));
  }

 private:
  MOIETY_HD_INLINE static constexpr uint32_t sign(float x) {
    return std::bit_cast<uint32_t>(x) >> kSignShift & kSign;
  }

  // Word is uint32_t or a vector of them, Float has as many floats.
  template <class Word>
  MOIETY_HD_INLINE static constexpr Word clamped(Word a) {
    return a > kMaxBits ? Word{} + kMaxBits : a;
  }
  template <class Word>
  MOIETY_HD_INLINE static constexpr Word binade(Word a) {
    const Word e = a & 0x7F800000u;
    return e > kMinBinade ? e : Word{} + kMinBinade;
  }
  // The code of 2^e less the number of steps in 2^e.
  template <class Word>
  MOIETY_HD_INLINE static constexpr Word first_code(Word e) {
    return (e >> kDropped) - (kMinBinade >> kDropped);
  }
  // The last bit of a + 2^(e + kDropped) is worth one step, so the addition rounds. It leaves the
  // number of steps in the low bits, on top of `low` and first_code(e).
  template <class Float, class Word>
  MOIETY_HD_INLINE static constexpr Float rounded(Word a, Word low) {
    const Word e = binade(a);
    const Word magic = e + (static_cast<uint32_t>(kDropped) << 23) + first_code(e) + low;
    return std::bit_cast<Float>(a) + std::bit_cast<Float>(magic);
  }
  template <class Float, class Word>
  MOIETY_HD_INLINE static constexpr Word cut(Word a, Word r8) {
    const Word e = binade(a);
    const Float per_step = std::bit_cast<Float>(((254u + kMantissa) << 23) - e);
    const Float u = std::bit_cast<Float>(0x3F804000u | r8 << 15) - 1.0f;
    return truncated<Word>(std::bit_cast<Float>(a) * per_step + u) + first_code(e);
  }
  template <class Word, class Float>
  MOIETY_HD_INLINE static constexpr Word truncated(Float x) {
    if constexpr (std::is_same_v<Float, float>) {
      return static_cast<uint32_t>(static_cast<int32_t>(x));
    } else {
      return Word(__builtin_convertvector(x, decltype(Word{} > Word{})));
    }
  }
  // The low byte, unless x is NaN. The select is one of floats so that vectorizers, which push the
  // narrowing to bytes up through integer operations, narrow once.
  MOIETY_HD_INLINE static constexpr uint8_t finish(float x, float code) {
    const float out = is_nan(x) ? std::bit_cast<float>(static_cast<uint32_t>(kNan)) : code;
    return static_cast<uint8_t>(std::bit_cast<uint32_t>(out));
  }
};

}  // namespace moiety
