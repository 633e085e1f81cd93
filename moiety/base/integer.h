// Rounding of sizes, for numbers that are not negative. Inlined into every caller, whatever
// instruction set that is compiled for, and into kernels: no copy of one is linked for another.
#pragma once

#include <cstdint>

#include "moiety/base/host_device.h"

namespace moiety {

// The least number of pieces of size q >= 1 that hold n. Nothing overflows.
MOIETY_HD_INLINE constexpr int64_t ceil_div(int64_t n, int64_t q) { return n / q + (n % q != 0); }

// The least multiple of q >= 1 that is not less than n. The caller knows that it fits.
MOIETY_HD_INLINE constexpr int64_t round_up(int64_t n, int64_t q) { return ceil_div(n, q) * q; }

}  // namespace moiety
