// IEEE binary16. Conversion rounds to nearest even, overflows to infinity, keeps subnormals, and
// makes every NaN the positive canonical one (0x7FFF).
#pragma once

#include <bit>
#include <cstdint>

namespace moiety {

struct fp16 {
  uint16_t bits = 0;

  fp16() = default;
  constexpr explicit fp16(float x) : bits(encode(x)) {}
  constexpr operator float() const { return decode(bits); }

  static constexpr fp16 from_bits(uint16_t b) {
    fp16 out;
    out.bits = b;
    return out;
  }

  static constexpr uint16_t encode(float x) {
    const uint32_t b = std::bit_cast<uint32_t>(x);
    const uint32_t sign = (b >> 16) & 0x8000u;
    const uint32_t a = b & 0x7FFFFFFFu;
    if (a > 0x7F800000u) return 0x7FFFu;
    if (a >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65536 and above
    if (a < 0x38800000u) {  // below 2^-14, in units of 2^-24
      if (a < 0x33000000u) return static_cast<uint16_t>(sign);
      const uint32_t shift = 126u - (a >> 23);
      const uint32_t m = (a & 0x7FFFFFu) | 0x800000u;
      const uint32_t q = m >> shift;
      const uint32_t rest = m & ((1u << shift) - 1u);
      const uint32_t half = 1u << (shift - 1u);
      return static_cast<uint16_t>(sign | (q + (rest > half || (rest == half && (q & 1u)))));
    }
    const uint32_t rounded = a + 0xFFFu + ((a >> 13) & 1u);  // may carry up to infinity
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }

  static constexpr float decode(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 31u;
    const uint32_t mantissa = h & 0x3FFu;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
    if (exponent == 0) {
      const float v = static_cast<float>(mantissa) * 0x1p-24f;
      return sign ? -v : v;
    }
    return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  }
};

}  // namespace moiety
