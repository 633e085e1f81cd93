#include "moiety/base/integer.h"

#include <limits>

#include <gtest/gtest.h>

namespace moiety {
namespace {

static_assert(ceil_div(0, 1) == 0 && ceil_div(1, 128) == 1 && ceil_div(129, 128) == 2);
static_assert(round_up(0, 64) == 0 && round_up(1, 64) == 64 && round_up(128, 64) == 128);

TEST(Integer, RoundsUpToTheLeastThatHoldsAll) {
  for (int64_t q = 1; q <= 70; ++q) {
    for (int64_t n = 0; n <= 300; ++n) {
      int64_t pieces = 0;
      while (pieces * q < n) ++pieces;
      ASSERT_EQ(ceil_div(n, q), pieces) << n << " by " << q;
      ASSERT_EQ(round_up(n, q), pieces * q) << n << " by " << q;
    }
  }
}

TEST(Integer, TheLargestNumbersDoNotOverflow) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(ceil_div(kMax, kMax), 1);
  EXPECT_EQ(ceil_div(kMax, 2), kMax / 2 + 1);
  EXPECT_EQ(ceil_div(1, kMax), 1);
  EXPECT_EQ(round_up(kMax - 1, kMax), kMax);
}

}  // namespace
}  // namespace moiety
