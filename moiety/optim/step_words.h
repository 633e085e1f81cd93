// The vectors of float64 words by which a step's numbers come from the caller, travel between ranks
// and go back to the caller. The losses, as many as the caller likes and the same number on all
// ranks, follow the words named here; the spike test looks at the first.
#pragma once

#include <cstdint>

#include "moiety/optim/step_decision.h"

namespace moiety::optim {

// What a rank brings to a step. lr, weight decay and clip are the same on all ranks.
namespace input_word {
enum : int64_t {
  kLr,
  kWeightDecay,
  kClip,      // of the norm; 0: none
  kTokens,    // loss tokens of this rank
  kBad,       // non-finite values that this rank saw elsewhere than in gradients
  kOverflow,  // not 0: this rank's capacity did not suffice: skip, halt, repeat
  kRequired,  // the capacity that it needed
  kFlags,     // 32 bits: anything that one rank must be able to tell all
  kCount      // of words before the losses, which are sums over this rank's tokens
};
}  // namespace input_word

// What ranks gather.
namespace rank_word {
enum : int64_t {
  kSumsq,
  kClassSumsq,
  kBad = kClassSumsq + kParameterClasses,  // of both kinds
  kBadParameter,
  kTokens,
  kOverflow,
  kRequired,
  kFlags,
  kCount
};
}  // namespace rank_word

// What a step did; the same on all ranks.
namespace report_word {
enum : int64_t {
  kNorm,                                   // L2 norm of the mean gradient, before clipping
  kClassNorm,                              // of each class
  kCoef = kClassNorm + kParameterClasses,  // of clipping
  kSkip,
  kHalt,
  kSkipsInRow,
  kBad,           // non-finite elements and values
  kBadParameter,  // the first parameter with such a gradient, -1: none
  kBadRank,       // the first rank that found it
  kT,             // applied steps
  kLr,
  kTokens,
  kOverflow,  // on some rank
  kRequired,  // the largest
  kFlags,     // or-ed
  kCount      // the losses' sums over ranks follow
};
}  // namespace report_word

}  // namespace moiety::optim
