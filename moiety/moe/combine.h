// The way back from the experts: combine brings expert outputs home and sums them per token;
// combine_backward sends the gradient of the sum to the experts (docs/spec/ep.md#rows-and-sums).
//
// Rows are bfloat16, float16 or float32 with D elements, D within the group's limits; a row is
// contiguous, rows may be strided. Sums of quantized rows are Error(kUnsupported); combine_backward
// without weights also takes quantized gradients (payload.h). With T = 0 or C = 0 null pointers are
// fine. Collective; D, format, reduction and the presence of weights are equal on all ranks.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/moe/ep_group.h"
#include "moiety/moe/payload.h"
#include "moiety/moe/prepare.h"

namespace moiety::moe {

// The order of a token's sum. All terms are converted exactly to fp32 and added in fp32, rounded to
// nearest even; a sum starts with its first term.
enum class Reduction : uint8_t {
  kRank,  // per owner rank over k ascending, rounded to y's dtype; then over the ranks ascending
  kRankFp32,  // the same without that rounding; needs EpLimits::rank_fp32 unless rows are fp32
  kToken,     // over k ascending, whatever the ranks and the map; needs EpLimits::token_order
};

// out[t] = the sum over the live pairs of t + addend, rounded once to out's dtype; with slot_w
// terms are slot_w[slot] y[slot], added with fma. With one live pair, no weight, no addend and out
// in y's dtype, out gets the bytes of y. Without a live pair it is the addend, or +0.
struct CombineArgs {
  TensorView y_CD;
  TensorView slot_w = {};  // optional, float32 [C]
  TensorView addend = {};  // optional, [T, D] in y's dtype or float32; may be out itself
  Reduction reduction = Reduction::kRank;
  TensorView out_TD;  // y's dtype or float32
};
void combine(EpGroup& group, const EpPlan& plan, const CombineArgs& args, Stream stream);

// gy[slot] = g[t], bit for bit; with slot_w it is round(slot_w[slot] g[t]), and with y also
// g_slot_w[slot] = dot(y[slot], g[t]) in the order of lane_sum (base/math.h) with fma. Padding rows
// are zero, also in scales and g_slot_w. Rows from info[0] to C are left alone. With source_C gy is
// [M, ...] as in dispatch, without slot_w.
struct CombineBackwardArgs {
  Payload g_TD;
  TensorView slot_w = {};    // optional, float32 [C]; Error(kUnsupported) with a quantized g
  TensorView y_CD = {};      // optional, with slot_w; in g's dtype
  Payload gy_CD;             // result, in g's dtype; may be y itself
  TensorView g_slot_w = {};  // result, float32 [C], defined exactly if y is
  TensorView source_C = {};  // optional, int32 [C], from make_row_map
};
void combine_backward(EpGroup& group, const EpPlan& plan, const CombineBackwardArgs& args,
                      Stream stream);

}  // namespace moiety::moe
