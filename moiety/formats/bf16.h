// bfloat16: the upper half of a float. Conversion rounds to nearest even, overflows to infinity,
// keeps subnormals, and makes every NaN the positive canonical one (0x7FFF).
#pragma once

#include <bit>
#include <cstdint>

#include "moiety/base/host_device.h"

namespace moiety {

struct bf16 {
  uint16_t bits = 0;

  bf16() = default;
  MOIETY_HD_INLINE constexpr explicit bf16(float x) : bits(encode(x)) {}
  MOIETY_HD_INLINE constexpr operator float() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }

  MOIETY_HD static constexpr bf16 from_bits(uint16_t b) {
    bf16 out;
    out.bits = b;
    return out;
  }
  MOIETY_HD_INLINE static constexpr uint16_t encode(float x) {
    const uint32_t b = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>(x != x ? 0x7FFFu : rounded);
  }
  // Adds r16 below the kept bits and cuts: rounds away from zero with the probability of the
  // fraction that is lost. Infinities and NaN are as in `encode`.
  MOIETY_HD_INLINE static constexpr uint16_t encode_stochastic(float x, uint16_t r16) {
    const uint32_t b = std::bit_cast<uint32_t>(x);
    const bool finite = (b & 0x7F800000u) != 0x7F800000u;
    return finite ? static_cast<uint16_t>((b + r16) >> 16) : encode(x);
  }
};

}  // namespace moiety
