// What a step does with the gradient's statistics: norm, clipping, bias corrections, and whether
// the step is applied, skipped, or the run must halt (spec optimizer_checkpoint, section 4). A pure
// function of the group's sums, so that all ranks decide alike.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "moiety/optim/parameter.h"

namespace moiety::optim {

inline constexpr int kParameterClasses = 4;

// Sums over all ranks, in rank order.
struct StepStatistics {
  double sumsq = 0;  // of the summed gradient, unscaled; every logical element counted once
  std::array<double, kParameterClasses> class_sumsq{};
  int64_t bad = 0;               // non-finite elements
  int bad_parameter = -1;        // smallest index of a parameter that has one
  int bad_rank = -1;             // lowest rank that found it there
  int64_t tokens = 0;            // loss tokens
  bool overflow = false;         // a rank's capacity did not suffice: the step must be repeated
  int64_t required = 0;          // largest capacity that a rank asked for
  uint32_t flags = 0;            // the caller's, or-ed
  std::vector<double> losses{};  // the caller's sums; the first is what the spike test looks at
};

enum class NanGuard {
  kOff,    // non-finite gradients are applied
  kStep,   // the step is skipped
  kTensor  // the run halts
};

struct StepLimits {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double clip = 0;  // of the norm; 0: none
  NanGuard guard = NanGuard::kStep;
  int max_skips = 3;       // in a row, then halt; 0: never
  double spike_sigma = 0;  // skip if the loss is above mean + sigma*std of the last 128; 0: off
};

// What is carried from step to step; saved with a checkpoint, but for the powers.
struct StepState {
  int64_t t = 0;  // applied steps
  double b1pow = 1;
  double b2pow = 1;
  int skips_in_row = 0;
  bool halt = false;           // stays until the host clears it: steps change nothing
  std::vector<double> losses;  // mean losses of the last steps that were applied, oldest first

  // Sets t and the powers, by t multiplications: the same bits as step by step.
  void set_applied(int64_t applied, const StepLimits& limits);
};

inline constexpr size_t kSpikeWindow = 128;

struct StepDecision {
  double scale = 0;  // 1 / tokens
  double norm = 0;   // L2 norm of the mean gradient
  double coef = 1;   // of clipping
  bool skip = false;
  bool halt = false;
  float s = 0, k1 = 1, k2 = 1;  // of AdamW, if the step is applied
};

StepDecision decide(const StepLimits& limits, const StepStatistics& statistics, StepState& state);

}  // namespace moiety::optim
