// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/moe/router_cuda.h"

namespace moiety::moe::detail {

void forward_rows_cuda(const RouterConfig&, const RouterForwardArgs&, const Stream&) {
  fail_without_cuda("router_forward");
}
void add_losses_cuda(const RouterConfig&, const RouterLossArgs&, const Stream&) {
  fail_without_cuda("router_losses");
}
void backward_rows_cuda(const RouterConfig&, const RouterBackwardArgs&, const TensorView&,
                        const Stream&) {
  fail_without_cuda("router_backward");
}
void stack_rows_cuda(const TensorView&, const TensorView&, const Stream&) {
  fail_without_cuda("router_backward");
}
void add_pieces_cuda(const TensorView&, const TensorView&, float, const Stream&) {
  fail_without_cuda("router_backward");
}
void update_bias_cuda(const TensorView&, const TensorView&, float, const TensorView&,
                      const Stream&) {
  fail_without_cuda("router_update_bias");
}

}  // namespace moiety::moe::detail
