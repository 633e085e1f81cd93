// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/nn/attention_cuda.h"

namespace moiety::nn {

void attention_cuda(const AttentionArgs&, const Stream&) { fail_without_cuda("attention"); }
void attention_backward_cuda(const AttentionBackwardArgs&, const Stream&) {
  fail_without_cuda("attention_backward");
}
AttentionPath attention_path(const AttentionArgs&) { fail_without_cuda("attention"); }
AttentionPath attention_backward_path(const AttentionBackwardArgs&) {
  fail_without_cuda("attention_backward");
}

}  // namespace moiety::nn
