// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/optim/initialize.h"

namespace moiety::optim {

void round_weights_cuda(TensorView, TensorView, const Stream&) {
  fail_without_cuda("round_weights");
}

}  // namespace moiety::optim
