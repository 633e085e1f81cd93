#include "moiety/optim/step_rule.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

namespace moiety::optim {
namespace {

constexpr StepLimits kLimits{.beta1 = 0.9, .beta2 = 0.95, .clip = 1.0};

TEST(StepRule, NormAndClipping) {
  StepState state;
  // The mean gradient's norm is sqrt(sumsq) / tokens.
  StepDecision d = decide(kLimits, {.sumsq = 64, .tokens = 16}, state);
  EXPECT_EQ(d.norm, 0.5);
  EXPECT_EQ(d.coef, 1.0);
  EXPECT_EQ(d.s, 1.0f / 16);
  d = decide(kLimits, {.sumsq = 256, .tokens = 16}, state);  // at the limit
  EXPECT_EQ(d.coef, 1.0 / (1.0 + 1e-6));
  d = decide(kLimits, {.sumsq = 1024, .tokens = 16}, state);
  EXPECT_EQ(d.coef, 1.0 / (2.0 + 1e-6));
  EXPECT_EQ(d.s, static_cast<float>(1.0 / 16 * d.coef));
  StepLimits open = kLimits;
  open.clip = 0;
  EXPECT_EQ(decide(open, {.sumsq = 1024, .tokens = 16}, state).coef, 1.0);
  // A norm beyond fp32 is finite in fp64, and clipped like any other.
  d = decide(kLimits, {.sumsq = 1e78, .tokens = 1}, state);
  EXPECT_FALSE(d.skip);
  EXPECT_TRUE(std::isinf(static_cast<float>(d.norm)));
  EXPECT_EQ(d.s, static_cast<float>(1.0 / (1e39 + 1e-6)));
  EXPECT_EQ(state.t, 5);
}

TEST(StepRule, PowersFollowAppliedSteps) {
  StepState state;
  for (int i = 0; i < 7; ++i) {
    decide(kLimits, {.sumsq = 1, .bad = i == 3, .tokens = 1}, state);
  }
  EXPECT_EQ(state.t, 6);
  StepState again;
  again.set_applied(6, kLimits);
  EXPECT_EQ(again.b1pow, state.b1pow);
  EXPECT_EQ(again.b2pow, state.b2pow);
  EXPECT_NEAR(state.b1pow, std::pow(0.9, 6), 1e-15);
}

TEST(StepRule, SkipsAndHalts) {
  const StepStatistics good{.sumsq = 1, .tokens = 1};
  StepStatistics bad = good;
  bad.bad = 1;
  StepState state;
  for (int i = 0; i < 2; ++i) {
    const StepDecision d = decide(kLimits, bad, state);
    EXPECT_TRUE(d.skip);
    EXPECT_FALSE(d.halt);
  }
  EXPECT_FALSE(decide(kLimits, good, state).skip);
  EXPECT_EQ(state.skips_in_row, 0);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(decide(kLimits, bad, state).halt, i == 2);
  EXPECT_EQ(state.skips_in_row, 3);
  StepDecision d = decide(kLimits, good, state);  // changes nothing until the host clears it
  EXPECT_TRUE(d.skip);
  EXPECT_TRUE(d.halt);
  EXPECT_EQ(state.t, 1);
  EXPECT_EQ(state.skips_in_row, 3);
  state.halt = false;
  EXPECT_FALSE(decide(kLimits, good, state).skip);
}

TEST(StepRule, Guards) {
  const StepStatistics bad{
      .sumsq = std::numeric_limits<double>::quiet_NaN(), .bad = 2, .tokens = 1};
  StepLimits limits = kLimits;
  limits.guard = NanGuard::kOff;
  StepState state;
  EXPECT_FALSE(decide(limits, bad, state).skip);
  limits.guard = NanGuard::kTensor;
  const StepDecision d = decide(limits, bad, state);
  EXPECT_TRUE(d.skip);
  EXPECT_TRUE(d.halt);
  EXPECT_TRUE(std::isnan(d.norm));
}

TEST(StepRule, NoTokens) {
  StepState state;
  EXPECT_TRUE(decide(kLimits, {.sumsq = 0, .tokens = 0}, state).skip);
  EXPECT_EQ(state.skips_in_row, 1);
}

TEST(StepRule, OverflowHaltsButIsNoSkip) {
  StepState state;
  state.skips_in_row = 2;
  const StepDecision d = decide(kLimits, {.sumsq = 1, .tokens = 1, .overflow = true}, state);
  EXPECT_TRUE(d.skip);
  EXPECT_TRUE(d.halt);
  EXPECT_EQ(state.skips_in_row, 2);
  EXPECT_EQ(state.t, 0);
}

TEST(StepRule, Spikes) {
  StepLimits limits = kLimits;
  limits.spike_sigma = 3;
  StepState state;
  const auto step = [&](double loss) {
    return decide(limits, {.sumsq = 1, .tokens = 2, .losses = {2 * loss}}, state).skip;
  };
  EXPECT_FALSE(step(100));  // too early to tell
  // Losses of mean 5 and deviation 1.
  for (int i = 0; i < 128; ++i) EXPECT_FALSE(step(i % 2 ? 6 : 4));
  EXPECT_EQ(state.losses.size(), kSpikeWindow);
  EXPECT_TRUE(step(8.01));
  EXPECT_FALSE(step(7.9));
  EXPECT_EQ(state.losses.back(), 7.9);  // a spike does not enter the window
}

}  // namespace
}  // namespace moiety::optim
