// The learning rate of a step (docs/spec/optimizer.md#schedule).
#pragma once

#include <cstdint>

namespace moiety::optim {

enum class ScheduleKind { kConstant, kLinear, kCosine, kWsd };

struct Schedule {
  ScheduleKind kind = ScheduleKind::kCosine;
  double lr = 3e-4;      // the peak
  double min_lr = 3e-5;  // at the end of the decay
  int64_t steps = 1000;  // of the whole run, N
  int64_t warmup_steps = 100;
  int64_t decay_steps = 0;  // 0: all steps after the warm-up; of wsd: a tenth of all steps
};

// Rate of step n >= 0, in double. Warm-up: lr*(n+1)/warmup. Then x = how much of the decay is over,
// clamped to [0, 1]; the decay of linear and cosine begins after the warm-up, that of wsd ends with
// the run:
//   constant     lr
//   linear, wsd  lr + (min_lr - lr)*x
//   cosine       min_lr + (lr - min_lr)*(1 + cos(pi*x))/2
double learning_rate(const Schedule& schedule, int64_t n);

}  // namespace moiety::optim
