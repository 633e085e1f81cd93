// The learning rate of a step (docs/spec/optimizer.md#schedule).
#pragma once

#include <cstdint>

namespace moiety::optim {

enum class ScheduleKind { kConstant, kLinear, kCosine, kWsd };

struct Schedule {
  ScheduleKind kind = ScheduleKind::kCosine;
  double lr = 3e-4;      // the peak rate
  double min_lr = 3e-5;  // rate at the end of the decay
  int64_t steps = 1000;  // N, steps of the whole run
  int64_t warmup_steps = 100;
  int64_t decay_steps = 0;  // 0: all steps after the warm-up, for wsd a tenth of all steps
};

// The rate of step n >= 0, in double. In the warm-up it is lr*(n+1)/warmup. Then, with x = the
// finished part of the decay, clamped to [0, 1]:
//   constant     lr
//   linear, wsd  lr + (min_lr - lr)*x
//   cosine       min_lr + (lr - min_lr)*(1 + cos(pi*x))/2
// The decay of linear and cosine begins after the warm-up, that of wsd ends with the run.
double learning_rate(const Schedule& schedule, int64_t n);

}  // namespace moiety::optim
