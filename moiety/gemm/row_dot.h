// The canonical row dot (swiglu.h) and its pieces. Internal to moiety/gemm.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "moiety/base/simd.h"

namespace moiety::gemm {

inline constexpr int64_t kDotSegment = 64;

// One segment: n <= kDotSegment products of x(i) and y(i), where i counts from the segment's start.
template <class Math, class X, class Y>
MOIETY_INLINE Math dot_segment(int64_t n, X&& x, Y&& y) {
  Math lane[4] = {0, 0, 0, 0};
  for (int64_t i = 0; i < n; ++i) {
    Math& l = lane[i % 8 / 2];
    l = std::fma(x(i), y(i), l);
  }
  return (lane[0] + lane[1]) + (lane[2] + lane[3]);
}

template <class Math, class X, class Y>
MOIETY_INLINE Math row_dot(int64_t n, X&& x, Y&& y) {
  Math sum = 0;
  for (int64_t c = 0; c < n; c += kDotSegment) {
    sum += dot_segment<Math>(
        std::min(kDotSegment, n - c), [&](int64_t i) { return x(c + i); },
        [&](int64_t i) { return y(c + i); });
  }
  return sum;
}

}  // namespace moiety::gemm
