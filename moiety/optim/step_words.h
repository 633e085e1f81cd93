// The vectors of float64 words by which a step's numbers come from the caller, travel between ranks
// and go back to the caller. The losses follow the words named here; their number is the caller's
// choice and the same on all ranks. The spike test looks at the first.
#pragma once

#include <cstdint>

#include "moiety/optim/step_decision.h"

namespace moiety::optim {

// The words of a rank's input. lr, weight decay and clip are the same on all ranks.
namespace input_word {
enum : int64_t {
  kLr,
  kWeightDecay,
  kClip,      // largest norm; 0: any
  kTokens,    // loss tokens of this rank
  kBad,       // non-finite values that this rank saw elsewhere than in gradients
  kOverflow,  // not 0: this rank's capacity did not suffice; skip, halt, repeat
  kRequired,  // the capacity that it needed
  kFlags,     // 32 bits with which one rank can tell all anything
  kCount      // words before the losses, which are sums over this rank's tokens
};
}  // namespace input_word

// The words that ranks gather.
namespace rank_word {
enum : int64_t {
  kSumsq,
  kClassSumsq,
  kBad = kClassSumsq + kParameterClasses,  // of both kinds: gradients and other values
  kBadParameter,
  kTokens,
  kOverflow,
  kRequired,
  kFlags,
  kCount
};
}  // namespace rank_word

// The words that tell what a step did; but for the last one the same on all ranks.
namespace report_word {
enum : int64_t {
  kNorm,                                   // L2 norm of the mean gradient, before clipping
  kClassNorm,                              // one for each class
  kCoef = kClassNorm + kParameterClasses,  // clip factor
  kSkip,
  kHalt,
  kSkipsInRow,
  kBad,           // non-finite elements and values
  kBadParameter,  // first parameter with a non-finite gradient; -1: none
  kBadRank,       // the first rank that found it
  kT,             // applied steps
  kLr,
  kTokens,
  kOverflow,  // on at least one rank
  kRequired,  // largest over ranks
  kFlags,     // or-ed over ranks
  kStood,     // ns that this rank's GPU stood at what travels beside computing; not the same on all
  kCount      // the sums of the losses over ranks follow
};
}  // namespace report_word

}  // namespace moiety::optim
