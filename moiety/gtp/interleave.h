// The columns of rank after rank, side by side: one matrix from transposed shards.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::gtp {

// out[e][k][g * P + j] = parts[e][g][k][j], where parts_EGKP and out_EKC are uint8 without gaps and
// C = G * P. Every byte of out is written; the two do not overlap.
void interleave(TensorView parts_EGKP, TensorView out_EKC, Stream stream);

}  // namespace moiety::gtp
