// The decision that a step takes on the gradient's statistics: norm, clipping, bias corrections,
// and whether the step is applied, skipped, or the run must halt
// (docs/spec/optimizer.md#step-rule). All are pure functions of the group's sums over plain data,
// with the same bits on every rank and device.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "moiety/base/host_device.h"
#include "moiety/optim/parameter.h"

namespace moiety::optim {

inline constexpr int kParameterClasses = 4;
inline constexpr int64_t kSpikeWindow = 128;

enum class NanGuard {
  kOff,    // non-finite gradients are applied
  kStep,   // the step is skipped
  kTensor  // the run halts
};

struct StepRuleConfig {
  double beta1 = 0.9;
  double beta2 = 0.95;
  NanGuard guard = NanGuard::kStep;
  int max_skips = 3;       // skips in a row, then the run halts; 0: never
  double spike_sigma = 0;  // skip if the loss is above mean + sigma*std of the last 128; 0: off
};

// Sums over all ranks, in rank order.
struct StepStatistics {
  double sumsq = 0;  // of the summed gradient, unscaled; every logical element counts once
  std::array<double, kParameterClasses> class_sumsq{};
  int64_t bad = 0;             // number of non-finite elements
  int64_t bad_parameter = -1;  // smallest index of a parameter that has one
  int64_t bad_rank = -1;       // lowest rank that found it there
  int64_t tokens = 0;          // loss tokens
  bool overflow = false;       // a rank's capacity did not suffice, so the step must be repeated
  int64_t required = 0;        // largest capacity that a rank asked for
  uint32_t flags = 0;          // the caller's flags, or-ed
  bool has_loss = false;       // whether there is a loss for the spike test
  double loss = 0;
};

// The state that is carried from step to step. It is saved with a checkpoint, except for the
// powers. It has no pointers, so it may lie in memory of a GPU.
struct StepState {
  int64_t t = 0;  // number of applied steps
  double b1pow = 1;
  double b2pow = 1;
  int32_t skips_in_row = 0;
  int32_t halt = 0;  // stays until the host clears it; until then steps change nothing
  // Mean losses of the last steps that were applied; entry i is the last one whose number is i
  // modulo 128. `loss_count` losses were ever entered.
  int64_t loss_count = 0;
  std::array<double, kSpikeWindow> losses{};

  // Sets t and the powers by t multiplications, which gives the same bits as step by step.
  void set_applied(int64_t applied, const StepRuleConfig& config);
  // The last losses, oldest first, at most 128.
  std::vector<double> last_losses() const;
  void set_losses(std::span<const double> oldest_first);

  MOIETY_HD void enter_loss(double loss) { losses[loss_count++ % kSpikeWindow] = loss; }
};

struct StepDecision {
  double scale = 0;  // 1 / tokens
  double norm = 0;   // L2 norm of the mean gradient
  double coef = 1;   // clip factor
  bool skip = false;
  bool halt = false;
  float s = 0, k1 = 1, k2 = 1;  // constants of AdamW, if the step is applied
};

namespace detail {
MOIETY_HD inline bool is_spike(double loss, const StepState& state, double sigma) {
  if (sigma <= 0 || state.loss_count < kSpikeWindow) return false;
  const auto oldest = [&](int64_t i) {
    return state.losses[(state.loss_count + i) % kSpikeWindow];
  };
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < kSpikeWindow; ++i) sum += oldest(i);
  const double mean = sum / static_cast<double>(kSpikeWindow);
  for (int64_t i = 0; i < kSpikeWindow; ++i) {
    squares += (oldest(i) - mean) * (oldest(i) - mean);
  }
  const double deviation = std::sqrt(squares / static_cast<double>(kSpikeWindow));
  return loss > mean + sigma * deviation;
}
}  // namespace detail

// `clip` is the largest norm; 0 allows any.
MOIETY_HD inline StepDecision decide(const StepRuleConfig& config, double clip,
                                     const StepStatistics& x, StepState& state) {
  StepDecision out;
  const bool empty = x.tokens == 0;  // nothing to learn from, which is no fault
  out.scale = empty ? 0.0 : 1.0 / static_cast<double>(x.tokens);
  out.norm = out.scale * std::sqrt(x.sumsq);
  if (clip > 0) out.coef = std::min(1.0, clip / (out.norm + 1e-6));
  out.s = static_cast<float>(out.scale * out.coef);

  const bool bad = x.bad > 0 && config.guard != NanGuard::kOff;
  const double loss = x.has_loss ? x.loss * out.scale : 0;
  const bool spike = detail::is_spike(loss, state, config.spike_sigma);
  const bool held = state.halt || x.overflow;  // not the gradient's fault: no skip is counted
  out.skip = held || bad || empty || spike;
  const bool counts = !held && (bad || !empty);
  if (counts) state.skips_in_row = out.skip ? state.skips_in_row + 1 : 0;
  state.halt = held || (counts && out.skip && state.skips_in_row == config.max_skips) ||
               (bad && config.guard == NanGuard::kTensor);
  out.halt = state.halt != 0;
  if (out.skip) return out;

  state.t += 1;
  state.b1pow *= config.beta1;
  state.b2pow *= config.beta2;
  out.k1 = static_cast<float>(1 / (1 - state.b1pow));
  out.k2 = static_cast<float>(1 / (1 - state.b2pow));
  if (x.has_loss) state.enter_loss(loss);
  return out;
}

}  // namespace moiety::optim
