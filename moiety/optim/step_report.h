// What the caller of an optimizer gives to a step, and what the step tells.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "moiety/optim/parameter.h"
#include "moiety/optim/step_decision.h"

namespace moiety::optim {

inline constexpr int64_t kMaxStepLosses = 32;  // memory is provided for so many

// A rank's input of a step. lr, weight_decay and clip are the same on all ranks, and so is the
// number of losses.
struct StepInput {
  double lr = 0;
  double weight_decay = 0;
  double clip = 0;     // largest norm; 0: any
  int64_t tokens = 0;  // loss tokens of this rank
  // Sums over this rank's tokens, at most kMaxStepLosses; the spike test watches the first one.
  std::vector<double> losses{};
  int64_t bad = 0;  // non-finite values that this rank saw elsewhere; they count like its own
  // this rank's capacity did not suffice: the step is skipped, the run halts, the caller repeats it
  bool overflow = false;
  int64_t required = 0;  // the capacity that it needed
  uint32_t flags = 0;    // bits with which one rank can tell all anything
};

// The input as the words that `enqueue` takes.
std::vector<double> input_words(const StepInput& input);

// The result of a step, the same on all ranks.
struct StepReport {
  float norm = 0;  // L2 norm of the mean gradient, before clipping
  std::array<float, kParameterClasses> class_norms{};
  double coef = 1;  // clip factor
  bool skip = false;
  bool halt = false;
  int skips_in_row = 0;
  int64_t bad = 0;  // non-finite gradient elements, and StepInput::bad
  // first parameter with a non-finite gradient, and the first rank that found it
  std::string bad_parameter;
  int bad_rank = -1;
  int64_t t = 0;  // applied steps
  double lr = 0;
  int64_t tokens = 0;
  std::vector<double> losses{};  // summed over ranks
  bool overflow = false;         // on at least one rank
  int64_t required = 0;          // largest over ranks
  uint32_t flags = 0;            // or-ed over ranks
  int64_t stood_ns = 0;  // this rank's GPU at what travels beside computing; not the same on all
};

}  // namespace moiety::optim
