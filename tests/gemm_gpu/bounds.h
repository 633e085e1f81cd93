// Comparisons of the two devices' results for the same tensors.
#pragma once

#include "tests/support/tensors.h"
#include "tests/support/twin.h"

namespace moiety::gemm {

// Empty if equal in every bit.
inline std::string difference(const TensorView& got, const TensorView& expected) {
  if (same_bits(got, expected)) return "";
  for (int64_t i = 0; i < got.numel(); ++i) {
    const double x = get(got, i), y = get(expected, i);
    if (std::memcmp(&x, &y, sizeof x) != 0) {
      return text("element {} of {} is {}, expected {}", i, got.describe(), x, y);
    }
  }
  return "bits of NaN";
}

// |x| of every element.
inline void make_absolute(const TensorView& x) {
  for (int64_t i = 0; i < x.numel(); ++i) put(x, i, std::fabs(get(x, i)));
}

// Empty if each element is within the bound of gemm.h of a chain with the same products, whose
// absolute values sum to `magnitude`: half an ulp and `terms` * 2^-23 * magnitude for each of both.
inline std::string outside_bound(const TensorView& got, const TensorView& expected,
                                 const TensorView& magnitude, double terms) {
  for (int64_t i = 0; i < got.numel(); ++i) {
    const double x = get(got, i), y = get(expected, i);
    const double bound =
        2.02 * half_ulp(got.dtype(), y) + 2 * (terms + 3) * 0x1p-23 * std::fabs(get(magnitude, i));
    if (!(std::fabs(x - y) <= bound)) {
      return text("element {} of {} is {}, expected {} within {}", i, got.describe(), x, y, bound);
    }
  }
  return "";
}

}  // namespace moiety::gemm
