// E5M2: sign, 5 exponent bits, 2 mantissa bits, bias 15; subnormals count 2^-16. The largest value
// is 57344. Infinities (0x7C, 0xFC) and NaNs (0x7D to 0x7F and their negatives) decode, but
// encoding saturates and writes 0x7F for every NaN.
// (Micikevicius et al., "FP8 formats for deep learning", 2022.)
#pragma once

#include "moiety/formats/minifloat.h"

namespace moiety {

struct E5M2 : Minifloat<2, -14, 0x47600000u, 0x7F, 0x80> {
  // The value of the code in the low byte.
  MOIETY_HD_INLINE static constexpr float decode(uint32_t code) {
    const float number = decode_finite(code);
    constexpr uint32_t kPastMax = 0x47800000u;  // 65536, the place of infinity
    const float infinity = std::bit_cast<float>(std::bit_cast<uint32_t>(number) | 0x7F800000u);
    const float extended = abs_bits(number) == kPastMax ? infinity : number;
    return abs_bits(number) > kPastMax ? kCanonicalNan : extended;
  }
};

}  // namespace moiety
