// bfloat16: the upper half of a float. Conversion rounds to nearest even, overflows to infinity,
// keeps subnormals, and makes every NaN the positive canonical one (0x7FFF).
#pragma once

#include <bit>
#include <cstdint>

#include "moiety/base/simd.h"

namespace moiety {

struct bf16 {
  uint16_t bits = 0;

  bf16() = default;
  constexpr explicit bf16(float x) : bits(encode(x)) {}
  MOIETY_INLINE constexpr operator float() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }

  static constexpr bf16 from_bits(uint16_t b) {
    bf16 out;
    out.bits = b;
    return out;
  }
  MOIETY_INLINE static constexpr uint16_t encode(float x) {
    const uint32_t b = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((b & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : rounded);
  }
};

}  // namespace moiety
