// Products by cuBLASLt in builds without CUDA or cuBLASLt's headers: Moiety's tiles multiply
// instead.
#include "moiety/gemm/gemm_cuda.h"

namespace moiety::gemm {

bool gemm_cublaslt(const Product&, const Stream&, const TensorView&) { return false; }
int64_t cublaslt_workspace(const Product&, const Stream&) { return 0; }

const CublasLtStatus& cublaslt_status() {
  static const CublasLtStatus status{false,
                                     "cuBLASLt's headers were not there when this was built"};
  return status;
}

}  // namespace moiety::gemm
