#include "moiety/optim/step_rule.h"

#include <bit>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "moiety/optim/adamw.h"
#include "moiety/optim/grad_norm.h"
#include "tests/support/bits.h"

namespace moiety::optim {
namespace {

constexpr StepRuleConfig kRule{.beta1 = 0.9, .beta2 = 0.95};
constexpr double kClip = 1;

TEST(StepRule, NormAndClipping) {
  StepState state;
  // The mean gradient's norm is sqrt(sumsq) / tokens.
  StepDecision d = decide(kRule, kClip, {.sumsq = 64, .tokens = 16}, state);
  EXPECT_EQ(d.norm, 0.5);
  EXPECT_EQ(d.coef, 1.0);
  EXPECT_EQ(d.s, 1.0f / 16);
  d = decide(kRule, kClip, {.sumsq = 256, .tokens = 16}, state);  // at the limit
  EXPECT_EQ(d.coef, 1.0 / (1.0 + 1e-6));
  d = decide(kRule, kClip, {.sumsq = 1024, .tokens = 16}, state);
  EXPECT_EQ(d.coef, 1.0 / (2.0 + 1e-6));
  EXPECT_EQ(d.s, static_cast<float>(1.0 / 16 * d.coef));
  EXPECT_EQ(decide(kRule, 0, {.sumsq = 1024, .tokens = 16}, state).coef, 1.0);
  // A norm beyond fp32 is finite in fp64, and clipped like any other.
  d = decide(kRule, kClip, {.sumsq = 1e78, .tokens = 1}, state);
  EXPECT_FALSE(d.skip);
  EXPECT_TRUE(std::isinf(static_cast<float>(d.norm)));
  EXPECT_EQ(d.s, static_cast<float>(1.0 / (1e39 + 1e-6)));
  EXPECT_EQ(state.t, 5);
}

TEST(StepRule, PowersFollowAppliedSteps) {
  StepState state;
  for (int i = 0; i < 7; ++i) {
    decide(kRule, kClip, {.sumsq = 1, .bad = i == 3, .tokens = 1}, state);
  }
  EXPECT_EQ(state.t, 6);
  StepState again;
  again.set_applied(6, kRule);
  EXPECT_EQ(again.b1pow, state.b1pow);
  EXPECT_EQ(again.b2pow, state.b2pow);
  EXPECT_NEAR(state.b1pow, std::pow(0.9, 6), 1e-15);
  // A checkpoint's number may be anything: powers that have ended take no more time.
  again.set_applied(int64_t{1} << 53, kRule);
  EXPECT_LT(again.b2pow, 1e-300);
}

TEST(StepRule, SkipsAndHalts) {
  const StepStatistics good{.sumsq = 1, .tokens = 1};
  StepStatistics bad = good;
  bad.bad = 1;
  StepState state;
  for (int i = 0; i < 2; ++i) {
    const StepDecision d = decide(kRule, kClip, bad, state);
    EXPECT_TRUE(d.skip);
    EXPECT_FALSE(d.halt);
  }
  EXPECT_FALSE(decide(kRule, kClip, good, state).skip);
  EXPECT_EQ(state.skips_in_row, 0);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(decide(kRule, kClip, bad, state).halt, i == 2);
  EXPECT_EQ(state.skips_in_row, 3);
  StepDecision d = decide(kRule, kClip, good, state);  // changes nothing until the host clears it
  EXPECT_TRUE(d.skip);
  EXPECT_TRUE(d.halt);
  EXPECT_EQ(state.t, 1);
  EXPECT_EQ(state.skips_in_row, 3);
  state.halt = 0;
  EXPECT_FALSE(decide(kRule, kClip, good, state).skip);
}

TEST(StepRule, Guards) {
  const StepStatistics bad{
      .sumsq = std::numeric_limits<double>::quiet_NaN(), .bad = 2, .tokens = 1};
  StepRuleConfig rule = kRule;
  rule.guard = NanGuard::kOff;
  StepState state;
  EXPECT_FALSE(decide(rule, kClip, bad, state).skip);
  rule.guard = NanGuard::kTensor;
  const StepDecision d = decide(rule, kClip, bad, state);
  EXPECT_TRUE(d.skip);
  EXPECT_TRUE(d.halt);
  EXPECT_TRUE(std::isnan(d.norm));
}

TEST(StepRule, NoTokens) {
  StepState state;
  state.skips_in_row = 2;
  const StepDecision d = decide(kRule, kClip, {.sumsq = 0, .tokens = 0}, state);
  EXPECT_TRUE(d.skip);
  EXPECT_FALSE(d.halt);
  EXPECT_EQ(d.norm, 0);
  EXPECT_EQ(state.skips_in_row, 2);  // no fault of the gradient
}

TEST(StepRule, OverflowHaltsButIsNoSkip) {
  StepState state;
  state.skips_in_row = 2;
  const StepDecision d = decide(kRule, kClip, {.sumsq = 1, .tokens = 1, .overflow = true}, state);
  EXPECT_TRUE(d.skip);
  EXPECT_TRUE(d.halt);
  EXPECT_EQ(state.skips_in_row, 2);
  EXPECT_EQ(state.t, 0);
}

TEST(StepRule, Spikes) {
  StepRuleConfig rule = kRule;
  rule.spike_sigma = 3;
  StepState state;
  const auto step = [&](double loss) {
    return decide(rule, kClip, {.sumsq = 1, .tokens = 2, .has_loss = true, .loss = 2 * loss}, state)
        .skip;
  };
  EXPECT_FALSE(step(100));  // too early to tell
  // Losses of mean 5 and deviation 1.
  for (int i = 0; i < 128; ++i) EXPECT_FALSE(step(i % 2 ? 6 : 4));
  EXPECT_EQ(state.last_losses().size(), kSpikeWindow);
  EXPECT_TRUE(step(8.01));
  EXPECT_FALSE(step(7.9));
  EXPECT_EQ(state.last_losses().back(), 7.9);  // a spike does not enter the window
}

TEST(StepRule, LossesComeBackOldestFirst) {
  StepState state;
  EXPECT_TRUE(state.last_losses().empty());
  std::vector<double> all;
  for (int i = 0; i < 300; ++i) all.push_back(i);
  for (const double loss : all) state.enter_loss(loss);
  const std::vector<double> last(all.end() - kSpikeWindow, all.end());
  EXPECT_EQ(state.last_losses(), last);
  StepState restored;
  restored.set_losses(last);
  restored.enter_loss(300);
  state.enter_loss(300);
  EXPECT_EQ(restored.last_losses(), state.last_losses());
  restored.set_losses(std::span(all).first(3));
  EXPECT_EQ(restored.last_losses(), (std::vector<double>{0, 1, 2}));
}

TensorView words_of(std::vector<double>& x) {
  return {x.data(), DType::kFloat64, {static_cast<int64_t>(x.size())}};
}

// Two ranks' words, from statistics and input to the report.
TEST(StepRule, WordsOfTheRanksAreCombined) {
  const int64_t losses = 2, width = rank_word::kCount + losses;
  std::vector<double> all, input;
  for (const int rank : {0, 1}) {
    GradStatistics sums{.sumsq = rank ? 96.0 : 160.0,
                        .class_sumsq = {rank ? 0.0 : 64.0, 16, 0, 1},
                        .bad = rank ? 2 : 0,
                        .bad_parameter = rank ? 4 : -1};
    namespace in = input_word;
    input.assign(in::kCount + losses, 0);
    input[in::kLr] = 0.25;
    input[in::kWeightDecay] = 0.125;
    input[in::kClip] = 1;
    input[in::kTokens] = rank ? 3 : 5;
    input[in::kBad] = rank ? 7 : 0;
    input[in::kRequired] = rank ? 10 : 20;
    input[in::kFlags] = rank ? 4294967295u - 1 : 1;
    input[in::kCount] = rank ? 2.5 : 1.5;
    input[in::kCount + 1] = 8;
    std::vector<double> words(width, -1);
    pack_words(byte_view(sums), words_of(input), words_of(words), Stream());
    all.insert(all.end(), words.begin(), words.end());
  }
  const auto run = [&](NanGuard guard, StepState& state, AdamWStep& step) {
    std::vector<double> report(report_word::kCount + losses, -7);
    step_rule({.guard = guard}, words_of(input), words_of(all).reshape({2, width}),
              byte_view(state), byte_view(step), words_of(report), Stream());
    return report;
  };
  StepState state;
  AdamWStep step;
  namespace word = report_word;
  std::vector<double> expected(word::kCount + losses);
  expected[word::kNorm] = 2;
  expected[word::kClassNorm] = 1;
  expected[word::kClassNorm + 1] = std::sqrt(32.0) / 8;
  expected[word::kClassNorm + 3] = std::sqrt(2.0) / 8;
  expected[word::kCoef] = 1 / (2 + 1e-6);
  expected[word::kSkip] = 1;
  expected[word::kSkipsInRow] = 1;
  expected[word::kBad] = 9;
  expected[word::kBadParameter] = 4;
  expected[word::kBadRank] = 1;
  expected[word::kLr] = 0.25;
  expected[word::kTokens] = 8;
  expected[word::kRequired] = 20;
  expected[word::kFlags] = 4294967295u;
  expected[word::kCount] = 4;
  expected[word::kCount + 1] = 16;
  EXPECT_EQ(run(NanGuard::kStep, state, step), expected);
  EXPECT_EQ(step.skip, 1);
  EXPECT_EQ(state.t, 0);
  expected[word::kSkip] = expected[word::kSkipsInRow] = 0;
  expected[word::kT] = 1;
  EXPECT_EQ(run(NanGuard::kOff, state, step), expected);
  EXPECT_EQ(step.skip, 0);
  EXPECT_EQ(step.s, static_cast<float>(expected[word::kCoef] / 8));
  EXPECT_EQ(std::bit_cast<uint32_t>(step.k1), 0x41200000u);
  EXPECT_EQ(std::bit_cast<uint32_t>(step.k2), 0x41A00000u);
  EXPECT_EQ(step.lr, 0.25f);
  EXPECT_EQ(step.wd, 0.125f);
  EXPECT_EQ(step.t, 1u);
  EXPECT_EQ(state.last_losses(), std::vector<double>{0.5});
}

TEST(StepRule, RefusesWordsThatDoNotFit) {
  GradStatistics sums;
  std::vector<double> input(input_word::kCount + 1), words(rank_word::kCount);
  EXPECT_THROW(pack_words(byte_view(sums), words_of(input), words_of(words), Stream()), Error);
  input.resize(input_word::kCount - 1);
  EXPECT_THROW(pack_words(byte_view(sums), words_of(input), words_of(words), Stream()), Error);
}

}  // namespace
}  // namespace moiety::optim
