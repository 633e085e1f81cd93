// The sum that every transport must give: sources are added in rank order, in fp32 (fp64 and
// integers in their own type; integers wrap around), and rounded once. Maxima and minima of floats
// are NaN if a source is.
#pragma once

#include <cstdint>
#include <span>

#include "moiety/comm/communicator.h"

namespace moiety::comm {

// dst[i] := op over r of sources[r][i], for n elements of `dtype`. dst may be one of the sources.
// The work is spread over the calling thread's budget of cores.
void reduce(void* dst, std::span<const void* const> sources, int64_t n, DType dtype, ReduceOp op);

}  // namespace moiety::comm
