// The sentence of an error that kernels have found.
#pragma once

#include <string>

#include "moiety/comm/collective.h"
#include "moiety/comm/mapped/call_word.h"

namespace moiety::comm::mapped {

// The call as its peers see it, without the rows of all_to_all; `place` is Direct's.
PairCall pair_call(const CollectiveCall& call, int64_t place);

// `abort` is the reason of the abort that ended the wait, if it was one:
//   comm "dp", reduce_scatter 812 (float32, 67108864 B): rank 1 waited 100.0 s for rank 0 (...)
//   comm "dp", operation 812: rank 1 runs all_gather(bfloat16, 4096 B), rank 0 runs ...
std::string fault_text(const std::string& name, const Fault& fault, const std::string& abort);

}  // namespace moiety::comm::mapped
