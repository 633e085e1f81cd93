#include "moiety/optim/schedule.h"

#include <cmath>

#include <gtest/gtest.h>

namespace moiety::optim {
namespace {

Schedule make(ScheduleKind kind) {
  return {.kind = kind, .lr = 1.0, .min_lr = 0.1, .steps = 110, .warmup_steps = 10};
}

TEST(Schedule, WarmUpEndsAtThePeak) {
  for (const auto kind : {ScheduleKind::kConstant, ScheduleKind::kLinear, ScheduleKind::kCosine,
                          ScheduleKind::kWsd}) {
    EXPECT_EQ(learning_rate(make(kind), 0), 0.1);
    EXPECT_EQ(learning_rate(make(kind), 4), 0.5);
    EXPECT_EQ(learning_rate(make(kind), 9), 1.0);
    EXPECT_EQ(learning_rate(make(kind), 10), 1.0);
    Schedule cold = make(kind);
    cold.warmup_steps = 0;
    EXPECT_EQ(learning_rate(cold, 0), 1.0);
  }
}

TEST(Schedule, Constant) { EXPECT_EQ(learning_rate(make(ScheduleKind::kConstant), 1000), 1.0); }

TEST(Schedule, Linear) {
  Schedule s = make(ScheduleKind::kLinear);
  EXPECT_DOUBLE_EQ(learning_rate(s, 11), 1.0 - 0.9 / 100);
  EXPECT_DOUBLE_EQ(learning_rate(s, 60), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(s, 110), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(s, 5000), 0.1);
  s.decay_steps = 20;
  EXPECT_DOUBLE_EQ(learning_rate(s, 20), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(s, 30), 0.1);
}

TEST(Schedule, Cosine) {
  const Schedule s = make(ScheduleKind::kCosine);
  EXPECT_DOUBLE_EQ(learning_rate(s, 35), 0.1 + 0.9 * (1 + std::sqrt(0.5)) / 2);
  EXPECT_DOUBLE_EQ(learning_rate(s, 60), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(s, 110), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(s, 111), 0.1);
}

TEST(Schedule, WsdDecaysAtTheEnd) {
  Schedule s = make(ScheduleKind::kWsd);  // decays over steps 99 to 110
  EXPECT_EQ(learning_rate(s, 99), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(s, 100), 1.0 - 0.9 / 11);
  EXPECT_DOUBLE_EQ(learning_rate(s, 110), 0.1);
  s.decay_steps = 50;
  EXPECT_EQ(learning_rate(s, 60), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(s, 85), 0.55);
  s.decay_steps = 0;
  s.steps = 15;  // a tenth need not be whole
  EXPECT_EQ(learning_rate(s, 13), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(s, 14), 1.0 - 0.9 / 3);
}

TEST(Schedule, ARunShorterThanItsWarmUpDecaysInOneStep) {
  Schedule s = make(ScheduleKind::kLinear);
  s.steps = 5;
  EXPECT_EQ(learning_rate(s, 4), 0.5);
  EXPECT_EQ(learning_rate(s, 10), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(s, 11), 0.1);
}

}  // namespace
}  // namespace moiety::optim
