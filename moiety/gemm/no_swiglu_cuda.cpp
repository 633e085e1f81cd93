// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/gemm/activation_block.h"

namespace moiety::gemm {

void activation_forward_cuda(const ActivationArgs&, const ActivationBlock&, TensorView,
                             const Stream&) {
  fail_without_cuda("activation");
}
void activation_backward_cuda(const ActivationArgs&, const ActivationBlock&, TensorView, TensorView,
                              TensorView, const Stream&) {
  fail_without_cuda("activation");
}

}  // namespace moiety::gemm
