// UE8M0 (OCP "E8M0"): a power of two. Code c is 2^(c - 127) for c = 0 to 254; 0xFF is NaN. There is
// no sign and no zero.
#pragma once

#include "moiety/formats/fp32.h"

namespace moiety {

struct UE8M0 {
  static constexpr uint8_t kMaxCode = 0xFE;
  static constexpr uint8_t kNan = 0xFF;

  // The code of the least power of two >= |x|. Below the range, for zero too, it is 0; above it,
  // for infinity too, kMaxCode; NaN gives kNan. Non-decreasing in |x|.
  MOIETY_HD_INLINE static constexpr uint8_t encode_up(float x) {
    const uint32_t a = abs_bits(x);
    const uint32_t exponent = a <= 0x00400000u ? 0u : (a + 0x7FFFFFu) >> 23;
    const uint32_t code = exponent < kMaxCode ? exponent : kMaxCode;
    return static_cast<uint8_t>(is_nan(x) ? kNan : code);
  }
  // The value 2^(code - 127); the least one, 2^-127, is subnormal.
  MOIETY_HD_INLINE static constexpr float decode(uint8_t code) {
    const uint32_t value = code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23;
    return code == kNan ? kCanonicalNan : std::bit_cast<float>(value);
  }
  // The inverse 2^(127 - code), which is exact.
  MOIETY_HD_INLINE static constexpr float inverse(uint8_t code) {
    const uint32_t value = code == kMaxCode ? 0x00400000u : (254u - code) << 23;
    return code == kNan ? kCanonicalNan : std::bit_cast<float>(value);
  }
};

}  // namespace moiety
