#include "apps/moiety/commands/token_choice.h"

#include <cmath>
#include <map>

#include <gtest/gtest.h>

namespace moiety::app {
namespace {

const std::vector<float> kLogits{0.0f, 2.0f, 1.0f, 2.0f, -1.0f};

std::map<int32_t, double> shares(const ChoiceRules& rules) {
  constexpr int kDraws = 20000;
  TokenChoice choice(rules);
  std::map<int32_t, double> share;
  for (int n = 0; n < kDraws; ++n) share[choice.choose(kLogits, n)] += 1.0 / kDraws;
  return share;
}

TEST(TokenChoice, ZeroTemperatureTakesTheLikeliestTheFirstOfEquals) {
  TokenChoice choice({});
  for (int n = 0; n < 5; ++n) EXPECT_EQ(choice.choose(kLogits, n), 1);
}

TEST(TokenChoice, SharesAreThoseOfTheSoftmax) {
  for (const double temperature : {0.5, 1.0, 2.0}) {
    double total = 0;
    for (float x : kLogits) total += std::exp(x / temperature);
    auto share = shares({.temperature = temperature});
    for (size_t i = 0; i < kLogits.size(); ++i) {
      EXPECT_NEAR(share[i], std::exp(kLogits[i] / temperature) / total, 0.015) << temperature;
    }
  }
}

TEST(TokenChoice, TopKThenTopP) {
  EXPECT_EQ(shares({.temperature = 1, .top_k = 1}).size(), 1u);
  auto two = shares({.temperature = 1, .top_k = 2});
  EXPECT_EQ(two.size(), 2u);
  EXPECT_NEAR(two[1], 0.5, 0.015);
  EXPECT_NEAR(two[3], 0.5, 0.015);
  // The shares of all five are 0.39, 0.39, 0.14, 0.05, 0.02.
  EXPECT_EQ(shares({.temperature = 1, .top_p = 0.7}).size(), 2u);
  EXPECT_EQ(shares({.temperature = 1, .top_p = 0.8}).size(), 3u);
  EXPECT_EQ(shares({.temperature = 1, .top_p = 0.01}).size(), 1u);
  // top-p is a share of what top-k left.
  EXPECT_EQ(shares({.temperature = 1, .top_k = 2, .top_p = 0.5}).size(), 1u);
  EXPECT_EQ(shares({.temperature = 1, .top_k = 2, .top_p = 0.51}).size(), 2u);
}

TEST(TokenChoice, SeedAndPositionDecide) {
  TokenChoice a({.temperature = 1, .seed = 7}), b({.temperature = 1, .seed = 7}),
      c({.temperature = 1, .seed = 8});
  int different = 0;
  for (int n = 0; n < 100; ++n) {
    const int32_t token = a.choose(kLogits, n);
    EXPECT_EQ(token, b.choose(kLogits, n));
    different += token != c.choose(kLogits, n);
  }
  EXPECT_GT(different, 20);
}

}  // namespace
}  // namespace moiety::app
