// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/nn/loss.h"

namespace moiety::nn {

void cross_entropy_cuda(const CrossEntropyArgs&, const Stream&) {
  fail_without_cuda("cross_entropy");
}

}  // namespace moiety::nn
