// combine brings expert outputs home and sums them per token; combine_backward sends the gradient
// of the sum to the experts (docs/spec/ep.md#rows-and-sums).
//
// Rows are bfloat16, float16 or float32, D elements, D within the group's limits; a row is
// contiguous, rows may be strided. Sums of quantized rows: Unsupported. combine_backward without
// weights takes quantized gradients, too (payload.h). With T = 0 or C = 0 null pointers are fine.
// Collective; D, format, reduction and the presence of weights are equal on all ranks.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/moe/ep_group.h"
#include "moiety/moe/payload.h"
#include "moiety/moe/prepare.h"

namespace moiety::moe {

// The order of a token's sum. All terms are converted exactly to fp32 and added in fp32, to nearest
// even; a sum starts with its first term.
enum class Reduction : uint8_t {
  kRank,      // per owner rank over k ascending, rounded to y's type; then over the ranks ascending
  kRankFp32,  // the same without that rounding; needs EpLimits::rank_fp32 unless rows are fp32
  kToken,     // over k ascending, whatever the ranks and the map; needs EpLimits::token_order
};

// out[t] = sum over the pairs alive of t (of slot_w[slot] y[slot] with fma, if there is slot_w) +
// addend, rounded once to out's type. One pair alive, neither weight nor addend, out of y's type:
// the bytes of y. No pair alive: the addend, or +0.
struct CombineArgs {
  TensorView y_CD;
  TensorView slot_w = {};  // optional, float32 [C]
  TensorView addend = {};  // optional, [T, D] of y's type or float32; may be out itself
  Reduction reduction = Reduction::kRank;
  TensorView out_TD;  // y's type or float32
};
void combine(EpGroup& group, const EpPlan& plan, const CombineArgs& args, Stream stream);

// gy[slot] = g[t] by bytes; with slot_w round(slot_w[slot] g[t]), and with y too g_slot_w[slot] =
// dot(y[slot], g[t]) in the order of lane_sum (base/math.h) with fma. Padding rows are zero, in
// scales and g_slot_w too. Rows from info[0] to C are left alone.
struct CombineBackwardArgs {
  Payload g_TD;
  TensorView slot_w = {};    // optional, float32 [C]; with a quantized g: Unsupported
  TensorView y_CD = {};      // optional, with slot_w; g's type
  Payload gy_CD;             // out, g's type; may be y itself
  TensorView g_slot_w = {};  // out, float32 [C], exactly if there is y
};
void combine_backward(EpGroup& group, const EpPlan& plan, const CombineBackwardArgs& args,
                      Stream stream);

}  // namespace moiety::moe
