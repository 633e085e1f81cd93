#include "moiety/base/math.h"

#include <bit>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/bits.h"

namespace moiety {
namespace {

TEST(Math, SigmoidGoldens) {
  const auto bits = [](float x) { return bits_of(sigmoid(x)); };
  EXPECT_EQ(bits(1), 0x3F3B26A8u);
  EXPECT_EQ(bits(-1), 0x3E89B2B1u);
  EXPECT_EQ(bits(10), 0x3F7FFD06u);
  EXPECT_EQ(bits(-10), 0x383E6997u);
  EXPECT_EQ(bits(-87), 0x00B33687u);
  EXPECT_EQ(bits(-87.1f), 0u);
  EXPECT_TRUE(std::isnan(sigmoid(std::bit_cast<float>(0x7FFFFFFFu))));
  EXPECT_TRUE(std::isnan(sigmoid(std::bit_cast<float>(0xFFFFFFFFu))));
}

TEST(Math, ExpAndLogAccuracy) {
  for (float t = -86.9f; t <= 0; t += 0.00137f) {
    const double exact = std::exp(double(t));
    ASSERT_LE(std::abs(exp_nonpositive(t) - exact), 3.4 * 0x1p-24 * exact) << t;
  }
  for (float x = 1e-38f; x < 1e38f; x *= 1.0173f) {
    const double exact = std::log(double(x));
    ASSERT_NEAR(log(x), exact, std::abs(exact) * 0x1p-23) << x;
  }
  EXPECT_EQ(log(1.0f), 0.0f);
  EXPECT_EQ(log(0.0f), -HUGE_VALF);
  EXPECT_TRUE(std::isnan(log(-1.0f)));
}

TEST(Math, LaneSumFollowsTheStatedOrder) {
  for (int64_t n : {0, 1, 7, 8, 9, 255, 256, 257, 1000}) {
    std::vector<float> x(n);
    for (int64_t i = 0; i < n; ++i) x[i] = 1.0f / static_cast<float>(i + 3);
    std::vector<float> lanes(32, 0.0f);
    for (int64_t i = 0; i < n; ++i) lanes[(i / 8) % 32] += x[i];
    for (int o = 16; o; o /= 2) {
      for (int l = 0; l < o; ++l) lanes[l] += lanes[l + o];
    }
    EXPECT_EQ(lane_sum<float>(n, [&](float v, int64_t i) { return v + x[i]; }), lanes[0]);
  }
}

}  // namespace
}  // namespace moiety
