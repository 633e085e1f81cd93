// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/gemm/gemm_cuda.h"

namespace moiety::gemm {

void gemm_cuda(const GemmArgs&, const BlockGemm&, const Stream&) { fail_without_cuda("gemm"); }

}  // namespace moiety::gemm
