// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/nn/loss.h"

namespace moiety::model {

void cross_entropy_cuda(const CrossEntropyArgs&, const Stream&) {
  fail_without_cuda("cross_entropy");
}

}  // namespace moiety::model
