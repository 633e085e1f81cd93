// The bits of FP32 numbers.
#pragma once

#include <bit>
#include <cstdint>

#include "moiety/base/host_device.h"

namespace moiety {

// The NaN that Moiety writes as FP32. NaNs are selected, never computed: devices differ in the NaNs
// that arithmetic makes.
inline constexpr float kCanonicalNan = std::bit_cast<float>(0x7FFFFFFFu);
inline constexpr float kMaxFloat = std::bit_cast<float>(0x7F7FFFFFu);

// The bits of |x|, which order magnitudes as unsigned integers do: finite < infinity < NaN.
MOIETY_HD_INLINE constexpr uint32_t abs_bits(float x) {
  return std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu;
}
MOIETY_HD_INLINE constexpr bool is_nan(float x) { return x != x; }
MOIETY_HD_INLINE constexpr bool is_finite(float x) { return abs_bits(x) < 0x7F800000u; }
MOIETY_HD_INLINE constexpr float canonical(float x) { return is_nan(x) ? kCanonicalNan : x; }

}  // namespace moiety
