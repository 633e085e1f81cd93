// UE8M0 (OCP "E8M0"): a power of two, code c is 2^(c - 127), c = 0 to 254; 0xFF is NaN. No sign, no
// zero.
#pragma once

#include "moiety/formats/fp32.h"

namespace moiety {

struct UE8M0 {
  static constexpr uint8_t kMaxCode = 0xFE;
  static constexpr uint8_t kNan = 0xFF;

  // The least power of two >= |x|; 0 below the range (zero too), kMaxCode above it, infinity too.
  // Non-decreasing in |x|. NaN gives kNan.
  MOIETY_HD_INLINE static constexpr uint8_t encode_up(float x) {
    const uint32_t a = abs_bits(x);
    const uint32_t exponent = a <= 0x00400000u ? 0u : (a + 0x7FFFFFu) >> 23;
    const uint32_t code = exponent < kMaxCode ? exponent : kMaxCode;
    return static_cast<uint8_t>(is_nan(x) ? kNan : code);
  }
  // 2^(code - 127); the least one, 2^-127, is subnormal.
  MOIETY_HD_INLINE static constexpr float decode(uint8_t code) {
    const uint32_t value = code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23;
    return code == kNan ? kCanonicalNan : std::bit_cast<float>(value);
  }
  // 2^(127 - code), exact.
  MOIETY_HD_INLINE static constexpr float inverse(uint8_t code) {
    const uint32_t value = code == kMaxCode ? 0x00400000u : (254u - code) << 23;
    return code == kNan ? kCanonicalNan : std::bit_cast<float>(value);
  }
};

}  // namespace moiety
