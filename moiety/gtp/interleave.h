// The columns of rank after rank, side by side: what makes one matrix of transposed shards.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::gtp {

// out[e][k][g * P + j] = parts[e][g][k][j]; parts_EGKP and out_EKC uint8 without gaps, C = G * P.
// Every byte of out is written; the two do not overlap.
void interleave(TensorView parts_EGKP, TensorView out_EKC, Stream stream);

}  // namespace moiety::gtp
