// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/nn/rope.h"

namespace moiety::nn {

void rope_cuda(const RopeArgs&, const Stream&) { fail_without_cuda("rope"); }

}  // namespace moiety::nn
