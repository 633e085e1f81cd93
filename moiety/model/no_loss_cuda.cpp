// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/model/loss.h"

namespace moiety::model {

void cross_entropy_cuda(const CrossEntropyArgs&, const Stream&) {
  fail_without_cuda("cross_entropy");
}

}  // namespace moiety::model
