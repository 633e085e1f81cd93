// Elementary functions with the same bits on every device, since they use no libm
// (docs/spec/grouped.md#sigmoid). Templates have a double instantiation for gradient checks, which
// does use the C library.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "moiety/base/host_device.h"

namespace moiety {

// e^t for t <= 0 (NaN gives NaN); below -87 it is 0. Relative error at most 3.4 * 2^-24.
MOIETY_HD_INLINE float exp_nonpositive(float t) {
  const float z = std::fma(t, 0x1.715476p+0f, 0x1.8p+23f);
  const float n = z - 0x1.8p+23f;
  float f = std::fma(n, -0x1.63p-1f, t);
  f = std::fma(n, 0x1.bd0106p-13f, f);
  float q = 0x1.6a23dp-10f;
  q = std::fma(q, f, 0x1.123a2p-7f);
  q = std::fma(q, f, 0x1.5558f2p-5f);
  q = std::fma(q, f, 0x1.555492p-3f);
  q = std::fma(q, f, 0x1.fffffcp-2f);
  q = std::fma(q, f, 1.0f);
  q = std::fma(q, f, 1.0f);
  // The product keeps a NaN a NaN; an addition to the exponent bits would not.
  const float e = q * std::bit_cast<float>((std::bit_cast<uint32_t>(z) << 23) + 0x3F800000u);
  return t < -87.0f ? 0.0f : e;
}
inline double exp_nonpositive(double t) { return std::exp(t); }

// 1 / d, correctly rounded, for 1 <= d <= 2 (NaN gives NaN). A GPU's division is right for all
// numbers and takes three times as long.
MOIETY_HD_INLINE float reciprocal_of_1_to_2(float d) {
#ifdef __CUDA_ARCH__
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  r = std::fma(r, std::fma(-d, r, 1.0f), r);
  r = std::fma(r, std::fma(-d, r, 1.0f), r);
  return d == 0x1.fffffep+0f ? 0x1.000002p-1f : r;  // the one number that this rounds wrongly
#else
  return 1.0f / d;
#endif
}

// The sigmoid, 1 / (1 + e^-x).
MOIETY_HD_INLINE float sigmoid(float x) {
  const float e = exp_nonpositive(-std::fabs(x));
  const float r = reciprocal_of_1_to_2(1.0f + e);
  return x < 0 ? e * r : r;
}
inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// Natural logarithm in double with the same bits everywhere: it uses only exact scaling, +, *, /
// and fma. For positive normal arguments; the relative error is below 4 * 2^-53 away from 1, the
// absolute error below 2^-53 near it.
MOIETY_HD_INLINE double log_positive(double x) {
  const uint64_t b = std::bit_cast<uint64_t>(x);
  int exponent = static_cast<int>(b >> 52) - 1023;
  double m = std::bit_cast<double>((b & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull);
  if (m > 0x1.6a09e667f3bcdp+0) {
    m *= 0.5;
    ++exponent;
  }
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double p = 1.0 / 23;
  for (int k = 21; k >= 3; k -= 2) p = std::fma(p, z, 1.0 / k);
  const double e = exponent;
  const double low = std::fma(2.0 * s * z, p, e * 0x1.abc9e3b39803fp-41);
  return e * 0x1.62e42fefa3800p-1 + (2.0 * s + low);
}

// Natural logarithm of a float, at most 1 ulp off; 0 gives -inf, negative numbers and NaN give NaN.
MOIETY_HD inline float log(float x) {
  if (x == 0) return -std::numeric_limits<float>::infinity();
  if (!(x > 0)) return std::numeric_limits<float>::quiet_NaN();
  if (std::isinf(x)) return x;
  return static_cast<float>(log_positive(static_cast<double>(x)));
}
inline double log(double x) { return std::log(x); }

// The sum of a row in the order of docs/spec/ep.md#lane-sums. There are 32 lanes; lane l takes the
// groups of 8 elements i with i mod 32 = l, in ascending order, and the lanes are then folded 16,
// 8, 4, 2, 1. term(v, i) adds element i to v.
template <class T, class Term>
MOIETY_INLINE T lane_sum(int64_t n, Term&& term) {
  std::array<T, 32> lanes{};
  for (int64_t base = 0; base < n; base += 256) {
    for (int l = 0; l < 32; ++l) {
      const int64_t begin = base + 8 * l;
      const int64_t end = begin + 8 < n ? begin + 8 : n;
      for (int64_t i = begin; i < end; ++i) lanes[l] = term(lanes[l], i);
    }
  }
  for (int o = 16; o >= 1; o /= 2) {
    for (int l = 0; l < o; ++l) lanes[l] += lanes[l + o];
  }
  return lanes[0];
}

}  // namespace moiety
