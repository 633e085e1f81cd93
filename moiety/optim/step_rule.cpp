#include "moiety/optim/step_rule.h"

#include <algorithm>
#include <cmath>

namespace moiety::optim {
namespace {

bool is_spike(double loss, const std::vector<double>& window, double sigma) {
  if (sigma <= 0 || window.size() < kSpikeWindow) return false;
  double sum = 0, squares = 0;
  for (const double x : window) sum += x;
  const double mean = sum / static_cast<double>(window.size());
  for (const double x : window) squares += (x - mean) * (x - mean);
  const double deviation = std::sqrt(squares / static_cast<double>(window.size()));
  return loss > mean + sigma * deviation;
}

}  // namespace

void StepState::set_applied(int64_t applied, const StepLimits& limits) {
  t = applied;
  b1pow = b2pow = 1;
  for (int64_t i = 0; i < applied; ++i) {
    b1pow *= limits.beta1;
    b2pow *= limits.beta2;
  }
}

StepDecision decide(const StepLimits& limits, const StepStatistics& x, StepState& state) {
  StepDecision out;
  out.scale = 1.0 / static_cast<double>(x.tokens);
  out.norm = out.scale * std::sqrt(x.sumsq);
  if (limits.clip > 0) out.coef = std::min(1.0, limits.clip / (out.norm + 1e-6));
  out.s = static_cast<float>(out.scale * out.coef);

  const bool bad = x.bad > 0 && limits.guard != NanGuard::kOff;
  const double loss = x.losses.empty() ? 0 : x.losses[0] * out.scale;
  const bool spike = is_spike(loss, state.losses, limits.spike_sigma);
  const bool held = state.halt || x.overflow;  // not the gradient's fault: no skip is counted
  out.skip = held || bad || x.tokens == 0 || spike;
  if (!held) state.skips_in_row = out.skip ? state.skips_in_row + 1 : 0;
  state.halt = held || (out.skip && state.skips_in_row == limits.max_skips) ||
               (bad && limits.guard == NanGuard::kTensor);
  out.halt = state.halt;
  if (out.skip) return out;

  state.t += 1;
  state.b1pow *= limits.beta1;
  state.b2pow *= limits.beta2;
  out.k1 = static_cast<float>(1 / (1 - state.b1pow));
  out.k2 = static_cast<float>(1 / (1 - state.b2pow));
  if (!x.losses.empty()) {
    if (state.losses.size() == kSpikeWindow) state.losses.erase(state.losses.begin());
    state.losses.push_back(loss);
  }
  return out;
}

}  // namespace moiety::optim
