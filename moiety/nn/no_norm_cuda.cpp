// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/nn/norm.h"

namespace moiety::nn {

void norm_cuda(const NormArgs&, const Stream&) { fail_without_cuda("norm"); }
void norm_backward_cuda(const NormBackwardArgs&, const Stream&) {
  fail_without_cuda("norm_backward");
}

}  // namespace moiety::nn
