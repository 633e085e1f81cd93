// bf16 and fp16: every code decodes and encodes to itself, and rounding is checked at and beside
// every midpoint between neighbours.
#include <bit>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "moiety/formats/bf16.h"
#include "moiety/formats/fp16.h"

namespace moiety {
namespace {

template <class H>
class Half : public testing::Test {};
using HalfTypes = testing::Types<bf16, fp16>;
TYPED_TEST_SUITE(Half, HalfTypes);

template <class H>
H code(int b) {
  return H::from_bits(static_cast<uint16_t>(b));
}

TYPED_TEST(Half, EveryCodeRoundTrips) {
  for (int b = 0; b < 65536; ++b) {
    const float x = code<TypeParam>(b);
    if (std::isnan(x)) {
      EXPECT_EQ(TypeParam(x).bits, 0x7FFF);
    } else {
      ASSERT_EQ(TypeParam(x).bits, b);
    }
  }
}

TYPED_TEST(Half, RoundsToNearestEvenAtEveryMidpoint) {
  for (int b = 0;; ++b) {
    const float lo = code<TypeParam>(b), hi = code<TypeParam>(b + 1);
    if (std::isinf(hi)) break;
    const float mid = static_cast<float>((double(lo) + double(hi)) / 2);  // exact in float
    const int even = b % 2 == 0 ? b : b + 1;
    ASSERT_EQ(TypeParam(mid).bits, even) << b;
    ASSERT_EQ(TypeParam(std::nextafter(mid, 0.0f)).bits, b);
    ASSERT_EQ(TypeParam(std::nextafter(mid, HUGE_VALF)).bits, b + 1);
    ASSERT_EQ(TypeParam(-mid).bits, even | 0x8000);
  }
}

TEST(Fp16, OverflowsToInfinity) {
  EXPECT_EQ(fp16(65504.0f).bits, 0x7BFF);
  EXPECT_EQ(fp16(65519.996f).bits, 0x7BFF);
  EXPECT_EQ(fp16(65520.0f).bits, 0x7C00);
  EXPECT_EQ(fp16(-1e30f).bits, 0xFC00);
}

// Exactly as many of the 65536 random numbers round up as the lost fraction says.
TEST(Bf16, StochasticProbabilitiesAreExact) {
  for (uint32_t kept : {0x0000u, 0x0080u, 0x3F80u, 0xC2FFu, 0x7F7Fu}) {
    for (uint32_t fraction : {0u, 1u, 0x1234u, 0x8000u, 0xFFFFu}) {
      const float x = std::bit_cast<float>(kept << 16 | fraction);
      uint32_t ups = 0, downs = 0;
      for (uint32_t r = 0; r < 65536; ++r) {
        const uint16_t got = bf16::encode_stochastic(x, static_cast<uint16_t>(r));
        ups += got == kept + 1;
        downs += got == kept;
      }
      EXPECT_EQ(ups, fraction) << kept;
      EXPECT_EQ(ups + downs, 65536u) << kept << ' ' << fraction;
    }
  }
}

TEST(Bf16, StochasticKeepsInfinityAndNan) {
  for (uint16_t r : {0x0000, 0x8000, 0xFFFF}) {
    EXPECT_EQ(bf16::encode_stochastic(HUGE_VALF, r), 0x7F80);
    EXPECT_EQ(bf16::encode_stochastic(-HUGE_VALF, r), 0xFF80);
    EXPECT_EQ(bf16::encode_stochastic(std::bit_cast<float>(0xFFFFFFFFu), r), 0x7FFF);
    EXPECT_EQ(bf16::encode_stochastic(std::bit_cast<float>(0x7F800001u), r), 0x7FFF);
  }
}

TEST(Bf16, OverflowsToInfinity) { EXPECT_EQ(bf16(std::numeric_limits<float>::max()).bits, 0x7F80); }

}  // namespace
}  // namespace moiety
