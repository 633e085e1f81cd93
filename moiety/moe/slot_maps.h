// The maps by which experts read rows that are not in their order: which row, and in a group of one
// rank which weight, every slot of a plan has; or without a group those of the routing alone.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/moe/prepare.h"

namespace moiety::moe {

// Fills the maps of a plan of one rank, with w_TK float32 [T, K]. EpPlan::slot_TK is the inverse of
// source_C. On a GPU if the stream is, in one launch; `prepare` fills them on its way (PrepareArgs).
void make_slot_maps(const EpPlan& plan, TensorView w_TK, const SlotMaps& maps, Stream stream);

// T tokens, K choices, E experts, R = T * K rows. A pair is valid if 0 <= idx < E; the rows of an
// expert follow each other without gaps, ordered by (token, choice), as `prepare` orders them.
struct ExpertRowsArgs {
  TensorView idx_TK;         // int32 or int64 [T, K]
  TensorView w_TK = {};      // float32, optional
  TensorView count_E;        // result, int64 [E]: the rows of each expert
  TensorView source_R;       // result, int32 [R]: the token of a row, -1 past the last one
  TensorView row_TK;         // result, int32 [T, K]: the row of a pair, -1 if it is not valid
  TensorView slot_w_R = {};  // result with w_TK, float32 [R]: its bits, 0 past the last row
};

// On a GPU if the stream is; Error(kUnsupported) there for more than 4096 experts.
void expert_rows(const ExpertRowsArgs& args, Stream stream);

// The rows of any rank in the order (rank, token) in which they come, one for each token that has a
// pair alive here: source_C [C], int32, is the row of every slot, -1 for padding and the tail. With
// this map dispatch and combine_backward bring each row once. On a GPU if the stream is, in one
// launch, for plans of several ranks.
void make_row_map(const EpPlan& plan, TensorView source_C, Stream stream);
// The most rows of such a map.
int64_t mapped_rows(int ranks, int64_t tokens_max, int64_t capacity);

}  // namespace moiety::moe
