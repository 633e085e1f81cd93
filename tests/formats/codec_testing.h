// Helpers of the tests of the 4- and 8-bit codecs: the values of a format from its definition, in
// double precision, a search for the nearest one, and the inputs that decide.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/bits.h"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace moiety::testing {

inline float from_bits(uint32_t bits) { return std::bit_cast<float>(bits); }

// The finite magnitudes of a format; the index is the code.
struct Grid {
  std::vector<double> values;
  uint32_t sign;  // the sign bit of a code
  uint32_t nan;   // what NaN becomes

  // (E = 0: m; else 2^M + m) * 2^(max(E, 1) - bias - M) for codes 0 to `last`.
  static Grid make(int mantissa_bits, int bias, int last, uint32_t sign, uint32_t nan) {
    Grid grid{{}, sign, nan};
    for (int code = 0; code <= last; ++code) {
      const int exponent = code >> mantissa_bits;
      const int mantissa = code & ((1 << mantissa_bits) - 1);
      const int steps = exponent == 0 ? mantissa : (1 << mantissa_bits) + mantissa;
      grid.values.push_back(std::ldexp(steps, std::max(exponent, 1) - bias - mantissa_bits));
    }
    return grid;
  }

  double midpoint(size_t code) const { return (values[code] + values[code + 1]) / 2; }

  // The code nearest to a magnitude between values[floor] and the next value; ties go to the even
  // code.
  uint32_t nearest(double magnitude, size_t floor) const {
    if (floor + 1 == values.size()) return static_cast<uint32_t>(floor);
    const double mid = midpoint(floor);
    const bool up = magnitude > mid || (magnitude == mid && floor % 2 == 1);
    return static_cast<uint32_t>(floor + up);
  }
  size_t floor(double magnitude) const {
    return static_cast<size_t>(std::upper_bound(values.begin(), values.end(), magnitude) -
                               values.begin()) -
           1;
  }
  uint32_t encode(float x) const {
    if (std::isnan(x)) return nan;
    const double magnitude = std::fabs(static_cast<double>(x));
    return nearest(magnitude, floor(magnitude)) | (std::signbit(x) ? sign : 0);
  }
  // The largest value <= |x| + (2 r8 + 1) / 512 of the spacing at x.
  uint32_t encode_stochastic(float x, int r8) const {
    if (std::isnan(x)) return nan;
    const float magnitude = std::fabs(x);
    const size_t below = std::min(floor(magnitude), values.size() - 2);
    const float step = static_cast<float>(values[below + 1] - values[below]);
    const float t = std::fma(static_cast<float>(2 * r8 + 1) / 512, step, magnitude);
    return static_cast<uint32_t>(floor(t)) | (std::signbit(x) ? sign : 0);
  }
};

// FP32 patterns: all of BF16, +-2 ulp around every value and midpoint of the grid, subnormals, NaN
// payloads; of both signs.
inline std::vector<float> decisive_inputs(const Grid& grid) {
  std::vector<uint32_t> magnitudes;
  for (uint32_t b = 0; b < 0x8000; ++b) magnitudes.push_back(b << 16);
  const auto around = [&](double v) {
    const int64_t b = bits_of(static_cast<float>(v));
    for (int64_t d = -2; d <= 2; ++d)
      magnitudes.push_back(static_cast<uint32_t>(std::max<int64_t>(b + d, 0)));
  };
  for (size_t code = 0; code < grid.values.size(); ++code) {
    around(grid.values[code]);
    if (code + 1 < grid.values.size()) around(grid.midpoint(code));
  }
  around(HUGE_VAL);
  for (int bit = 0; bit < 23; ++bit) {
    const uint32_t b = 1u << bit;
    for (uint32_t pattern : {b, b - 1, b + 1, 0x7FFFFFu - b, 0x7FFFFFu - (b - 1)}) {
      magnitudes.push_back(pattern);                // subnormal
      magnitudes.push_back(0x7F800000u | pattern);  // NaN with a payload
    }
  }
  std::vector<float> inputs;
  for (uint32_t b : magnitudes) {
    inputs.push_back(from_bits(b));
    inputs.push_back(from_bits(b | 0x80000000u));
  }
  return inputs;
}

// Tests of codec F against its grid.
template <class F>
void expect_codes_round_trip(const Grid& grid) {
  for (uint32_t code = 0; code < grid.values.size(); ++code) {
    const float value = F::decode(static_cast<uint8_t>(code));
    EXPECT_EQ(value, grid.values[code]) << code;
    EXPECT_FALSE(std::signbit(value));
    EXPECT_EQ(F::encode(value), code);
    const uint32_t negative = code | grid.sign;
    EXPECT_EQ(bits_of(F::decode(static_cast<uint8_t>(negative))), bits_of(-value)) << code;
    EXPECT_EQ(F::encode(-value), negative);
  }
  EXPECT_EQ(grid.values.back(), F::kMax);
  EXPECT_EQ(grid.values.size(), F::kMaxCode + 1u);
}

template <class F>
void expect_encode_is_nearest(const Grid& grid) {
  for (float x : decisive_inputs(grid)) {
    ASSERT_EQ(F::encode(x), grid.encode(x)) << std::hexfloat << x << ' ' << bits_of(x);
  }
}

// Every 16th byte, the extremes and those beside the middle.
template <class F>
void expect_stochastic_is_largest_below(const Grid& grid) {
  for (float x : decisive_inputs(grid)) {
    for (int r8 :
         {0, 1, 16, 31, 48, 64, 81, 96, 127, 128, 129, 144, 176, 191, 208, 240, 254, 255}) {
      ASSERT_EQ(F::encode_stochastic(x, static_cast<uint8_t>(r8)), grid.encode_stochastic(x, r8))
          << std::hexfloat << x << ' ' << r8;
    }
  }
}

template <class F>
void expect_values_stay(const Grid& grid) {
  for (uint32_t code = 0; code < grid.values.size(); ++code) {
    for (int r8 = 0; r8 < 256; ++r8) {
      const float x = static_cast<float>(grid.values[code]);
      ASSERT_EQ(F::encode_stochastic(x, static_cast<uint8_t>(r8)), code);
      ASSERT_EQ(F::encode_stochastic(-x, static_cast<uint8_t>(r8)), code | grid.sign);
    }
  }
}

// Checks that at fraction k/4096 of each step, exactly floor(256 k/4096 + 1/2) of the 256 bytes
// round up, and the others down.
template <class F>
void expect_exact_probabilities(const Grid& grid) {
  for (uint32_t code = 0; code + 1 < grid.values.size(); ++code) {
    const double step = grid.values[code + 1] - grid.values[code];
    for (int k = 0; k < 4096; ++k) {
      const float x = static_cast<float>(grid.values[code] + step * k / 4096);  // exact
      int ups = 0, downs = 0;
      for (int r8 = 0; r8 < 256; ++r8) {
        const uint32_t got = F::encode_stochastic(x, static_cast<uint8_t>(r8));
        ups += got == code + 1;
        downs += got == code;
      }
      ASSERT_EQ(ups, (k + 8) / 16) << x;
      ASSERT_EQ(ups + downs, 256) << x;
    }
  }
}

// Subnormals flushed to zero by the caller's thread change nothing.
template <class F>
void expect_flush_mode_is_harmless(const Grid& grid) {
#ifdef __SSE__
  const std::vector<float> inputs = decisive_inputs(grid);
  const auto all = [&] {
    std::vector<uint32_t> out;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto byte = static_cast<uint8_t>(i * 37);
      out.push_back(F::encode(inputs[i]));
      out.push_back(F::encode_stochastic(inputs[i], byte));
      out.push_back(bits_of(F::decode(byte)));
    }
    return out;
  };
  const std::vector<uint32_t> want = all();
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040);  // flush to zero, denormals are zero
  const std::vector<uint32_t> flushed = all();
  _mm_setcsr(mode);
  EXPECT_EQ(want, flushed);
#endif
}

// Nightly: half a minute.
template <class F>
void expect_nearest_for_all_patterns(const Grid& grid) {
  int64_t wrong = 0;
  uint32_t first = 0;
  const auto check = [&](float x, size_t floor) {
    const uint32_t want = std::isnan(x) ? grid.nan
                                        : grid.nearest(std::fabs(static_cast<double>(x)), floor) |
                                              (std::signbit(x) ? grid.sign : 0);
    if (F::encode(x) != want && wrong++ == 0) first = bits_of(x);
  };
  size_t floor = 0;  // the code of the largest value <= |x|
  for (uint32_t b = 0; b < 0x80000000u; ++b) {
    const float x = from_bits(b);
    while (floor + 1 < grid.values.size() && x >= grid.values[floor + 1]) ++floor;
    check(x, floor);
    check(-x, floor);
  }
  EXPECT_EQ(wrong, 0) << "first at " << std::hex << first;
}

}  // namespace moiety::testing
