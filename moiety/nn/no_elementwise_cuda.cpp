// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/nn/elementwise.h"

namespace moiety::nn {

void document_starts_cuda(TensorView, TensorView, const Stream&) {
  fail_without_cuda("document_starts");
}
void round_to_bf16_cuda(TensorView, TensorView, bool, const Stream&) {
  fail_without_cuda("round_to_bf16");
}
void apply_sigmoid_cuda(TensorView, const Stream&) { fail_without_cuda("sigmoid"); }
void sigmoid_gradient_cuda(TensorView, TensorView, TensorView, const Stream&) {
  fail_without_cuda("sigmoid_gradient");
}

void set_random_state_cuda(const RandomState&, const Stream&) {
  fail_without_cuda("set_random_state");
}

}  // namespace moiety::nn
