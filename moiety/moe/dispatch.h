// The way to the experts: dispatch moves token rows to the experts that they chose;
// dispatch_backward brings the gradients of those rows home and sums them
// (docs/spec/ep.md#rows-and-sums).
//
// dispatch moves rows of any payload (payload.h): bfloat16, float16, float32 or quantized, with D
// elements, D within the group's limits. dispatch_backward sums, so quantized rows are
// Error(kUnsupported) there. With T = 0 or C = 0 null pointers are fine. Collective; D, format,
// pow2_scales and the presence of weights are equal on all ranks.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/moe/combine.h"
#include "moiety/moe/ep_group.h"
#include "moiety/moe/payload.h"
#include "moiety/moe/prepare.h"
#include "moiety/quant/amax_sink.h"

namespace moiety::moe {

// rows[slot] = x[t] and slot_w[slot] = w[t, k], bit for bit, for every live pair. Rows between
// rows_real and rows_padded of an expert are zero, also in scales and slot_w. Rows from info[0] to
// C are left alone unless zero_tail.
//
// With source_C (slot_maps.h) rows are [M, ...], M = mapped_rows, and rows[source_C[slot]] = x[t]:
// each row comes once, staged, and rows behind the last one are zero.
struct DispatchArgs {
  Payload x_TD;
  TensorView w_TK = {};    // optional, float32
  Payload rows_CD;         // result, in x's dtype or format
  TensorView slot_w = {};  // result, float32 [C], defined exactly if w_TK is
  bool zero_tail = false;
  // Optional, [L]: the amax of every local expert's rows. Error(kUnsupported) on a GPU.
  quant::AmaxSink sink = {};
  TensorView source_C = {};  // optional, int32 [C], from make_row_map
};
void dispatch(EpGroup& group, const EpPlan& plan, const DispatchArgs& args, Stream stream);

// gx[t] = the sum of g_rows over the live pairs of t (by `reduction`, without weights) + addend;
// gw[t, k] = g_slot_w[slot], bit for bit, and 0 for a pair that is not live.
struct DispatchBackwardArgs {
  TensorView g_rows_CD;
  TensorView g_slot_w = {};  // optional, float32 [C]
  TensorView addend = {};    // optional, [T, D] in g_rows' dtype or float32; may be gx itself
  Reduction reduction = Reduction::kRank;
  TensorView gx_TD;       // result, g_rows' dtype or float32
  TensorView gw_TK = {};  // result, float32, defined exactly if g_slot_w is
};
void dispatch_backward(EpGroup& group, const EpPlan& plan, const DispatchBackwardArgs& args,
                       Stream stream);

}  // namespace moiety::moe
