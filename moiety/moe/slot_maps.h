// The maps by which the experts of a group of one rank read rows where they lie: which token and
// which weight every slot of a plan has.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/moe/prepare.h"

namespace moiety::moe {

struct SlotMaps {
  TensorView source_C;  // int32 [C]: the token, -1 for padding and the tail
  TensorView slot_w;    // float32 [C]: the bits of w[t, k], 0 without a token
};

// Fills the maps of a plan of one rank, with w_TK float32 [T, K]. EpPlan::slot_TK is the inverse of
// source_C. On a GPU if the stream is, in one launch.
void make_slot_maps(const EpPlan& plan, TensorView w_TK, const SlotMaps& maps, Stream stream);

}  // namespace moiety::moe
