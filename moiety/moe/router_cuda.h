// The router on GPUs: all of it but the products. Internal to router.
#pragma once

#include "moiety/moe/router.h"

namespace moiety::moe::detail {

// From args.logits_TE on.
void forward_rows_cuda(const RouterConfig& config, const RouterForwardArgs& args,
                       const Stream& stream);
void add_losses_cuda(const RouterConfig& config, const RouterLossArgs& args, const Stream& stream);
void backward_rows_cuda(const RouterConfig& config, const RouterBackwardArgs& args,
                        const TensorView& dlogits_TE, const Stream& stream);
// bfloat16 rows to float32 ones without gaps.
void widen_cuda(const TensorView& x, const TensorView& out, const Stream& stream);
void update_bias_cuda(const TensorView& bias_E, const TensorView& count_E, float rate,
                      const TensorView& skip, const Stream& stream);

}  // namespace moiety::moe::detail
