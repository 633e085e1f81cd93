// bf16 and fp16: every code decodes and encodes to itself, and rounding is checked at and beside
// every midpoint between neighbours.
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

TEST(Bf16, OverflowsToInfinity) { EXPECT_EQ(bf16(std::numeric_limits<float>::max()).bits, 0x7F80); }

}  // namespace
}  // namespace moiety
