// E4M3 (OCP "E4M3FN"): sign, 4 exponent bits, 3 mantissa bits, bias 7; subnormals count 2^-9. The
// largest value is 448. No infinity: encoding saturates; 0x7F and 0xFF are NaN.
// (Micikevicius et al., "FP8 formats for deep learning", 2022.)
#pragma once

#include "moiety/formats/minifloat.h"

namespace moiety {

struct E4M3 : Minifloat<3, -6, 0x43E00000u, 0x7F, 0x80> {
  MOIETY_HD_INLINE static constexpr float decode(uint8_t code) {
    const float number = value(code);
    return abs_bits(number) > std::bit_cast<uint32_t>(kMax) ? kCanonicalNan : number;
  }
};

}  // namespace moiety
