// E4M3 (OCP "E4M3FN"): sign, 4 exponent bits, 3 mantissa bits, bias 7; subnormals count 2^-9. The
// largest value is 448. The format has no infinity: encoding saturates; 0x7F and 0xFF are NaN.
//  (Micikevicius et al., "FP8 formats for deep learning", 2022.)
#pragma once

#include "moiety/formats/minifloat.h"

namespace moiety {

struct E4M3 : Minifloat<3, -6, 0x43E00000u, 0x7F, 0x80> {
  // The value of the code in the low byte.
  MOIETY_HD_INLINE static constexpr float decode(uint32_t code) {
    const float number = decode_finite(code);
    return std::bit_cast<float>(abs_bits(number)) > kMax ? kCanonicalNan : number;
  }
};

}  // namespace moiety
