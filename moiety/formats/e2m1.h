// E2M1: sign, 2 exponent bits, 1 mantissa bit, bias 1. Codes 0 to 7 are 0, .5, 1, 1.5, 2, 3, 4, 6;
// bit 3 is the sign. The format has neither infinity nor NaN: encoding saturates, and NaN gives 0x7
// (+6).
#pragma once

#include "moiety/formats/minifloat.h"

namespace moiety {

struct E2M1 : Minifloat<1, 0, 0x40C00000u, 0x7, 0x8> {
  // The value of the code in the low nibble.
  MOIETY_HD_INLINE static constexpr float decode(uint32_t code) { return decode_finite(code); }

  // Packs two elements: element 2i lies in the low nibble of byte i, element 2i + 1 in the high
  // one.
  MOIETY_HD_INLINE static constexpr uint8_t pack(uint8_t even, uint8_t odd) {
    return static_cast<uint8_t>(even | odd << 4);
  }
  MOIETY_HD_INLINE static constexpr uint8_t unpack(uint8_t byte, bool odd) {
    return static_cast<uint8_t>(odd ? byte >> 4 : byte & 15);
  }
};

}  // namespace moiety
