// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/base/step_ring.h"

namespace moiety::detail {

void copy_ring_cuda(const RingCopy&, const Stream&) { fail_without_cuda("step ring"); }

}  // namespace moiety::detail
