// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/gtp/accumulate_job.h"

namespace moiety::gtp {

void accumulate_cuda(const AccumulateJob&, const Stream&) { fail_without_cuda("gtp accumulate"); }

}  // namespace moiety::gtp
