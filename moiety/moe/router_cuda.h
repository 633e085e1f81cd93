// The router on GPUs: everything except the products, and the operations around those. Internal to
// the router.
#pragma once

#include "moiety/moe/router.h"

namespace moiety::moe::detail {

// router_choose, but for the sums of its statistics' blocks, which are still to be added.
BlockSums forward_rows_cuda(const RouterConfig& config, const RouterChooseArgs& args,
                            const Stream& stream);
void add_blocks_cuda(const BlockSums& sums, const Stream& stream);
void add_losses_cuda(const RouterConfig& config, const RouterLossArgs& args, const Stream& stream);
// router_choose_backward; `dlogits_TE` is float32 [T, E], or bfloat16 [T, 3W], W >= E, for its three
// pieces: columns [0, E) have the largest, those from 2W on the smallest, and all three add up to
// it; columns behind E of each are zeros.
// The gradients of weights may come from `slots`.
void backward_rows_cuda(const RouterConfig& config, const RouterChooseBackwardArgs& args,
                        const RouterSlots& slots, const Stream& stream);
// out_3ED, without gaps, := the bfloat16 rows three times; begin := where slices of equal numbers of
// tokens begin, and at its end `tokens`.
void stack_rows_cuda(const TensorView& w_ED, const TensorView& out_3ED, int64_t tokens,
                     const TensorView& begin, const Stream& stream);
// dw := round(beta * dw + the sums), float32 without gaps, of slices that are added in ascending
// order; a slice has 1 sum, or 3 of pieces, which are added from the smallest. beta is 0 or 1.
void add_pieces_cuda(const TensorView& sums_SPED, int64_t pieces, const TensorView& dw_ED,
                     float beta, const Stream& stream);
void update_bias_cuda(const TensorView& bias_E, const TensorView& count_E, float rate,
                      const TensorView& skip, const Stream& stream);

}  // namespace moiety::moe::detail
