#include "moiety/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "moiety/base/error.h"

namespace moiety::optim {

double learning_rate(const Schedule& s, int64_t n) {
  MOIETY_CHECK(n >= 0, "learning_rate: step {}", n);
  if (n < s.warmup_steps) {
    return s.lr * static_cast<double>(n + 1) / static_cast<double>(s.warmup_steps);
  }
  if (s.kind == ScheduleKind::kConstant) return s.lr;
  const double steps = static_cast<double>(s.steps);
  const double warmup = static_cast<double>(s.warmup_steps);
  const bool wsd = s.kind == ScheduleKind::kWsd;
  double decay = static_cast<double>(s.decay_steps);
  if (s.decay_steps == 0) decay = wsd ? steps / 10 : steps - warmup;
  decay = std::max(1.0, decay);
  const double start = wsd ? steps - decay : warmup;
  const double x = std::clamp((static_cast<double>(n) - start) / decay, 0.0, 1.0);
  if (s.kind == ScheduleKind::kCosine) {
    return s.min_lr + (s.lr - s.min_lr) * (1 + std::cos(std::numbers::pi * x)) / 2;
  }
  return s.lr + (s.min_lr - s.lr) * x;
}

}  // namespace moiety::optim
