// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/gemm/grouped_gemm_cuda.h"

namespace moiety::gemm {

void grouped_gemm_cuda(const GroupedGemmArgs&, const Stream&) { fail_without_cuda("grouped_gemm"); }
void grouped_products_cuda(const GroupedGemmArgs&, const Stream&) {
  fail_without_cuda("grouped_gemm");
}
void grouped_bias_grad_cuda(const GroupedBiasGradArgs&, const Stream&) {
  fail_without_cuda("grouped_bias_grad");
}
void grouped_scale_grad_cuda(const GroupedScaleGradArgs&, const Stream&) {
  fail_without_cuda("grouped_scale_grad");
}
void record_faults_cuda(const Groups&, OperationId, const GroupedTensor&, const GroupedTensor&,
                        const Stream&) {
  fail_without_cuda("record_faults");
}

}  // namespace moiety::gemm
