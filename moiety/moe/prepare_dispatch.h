// prepare and dispatch in one, for batches of few tokens, where latency counts
// (docs/spec/ep.md#early-rows).
//
// A rank stores its rows before it knows the counts of its peers: of these only the slots depend.
// Rows that turn out dead are ignored. The results are those of the two calls, bit for bit, and so
// are errors; it takes two epochs, of which the plan has the first. Collective: all ranks call it,
// or none.
//
// Error(kInvalidArgument) with EpLimits::depth 1, where rows would wait for the counts. Rows are
// staged, whatever is attached. Over collectives, in a group of one rank on a GPU, and among ranks on
// GPUs that reserved more than kFewTokens, the two run one after the other.
#pragma once

#include "moiety/moe/dispatch.h"
#include "moiety/moe/prepare.h"

namespace moiety::moe {

// The tokens of a rank up to which this is quicker than the two calls.
inline constexpr int64_t kFewTokens = 256;

EpPlan prepare_dispatch(EpGroup& group, const PrepareArgs& args, const DispatchArgs& rows,
                        TensorView plan_memory, Stream stream);

}  // namespace moiety::moe
