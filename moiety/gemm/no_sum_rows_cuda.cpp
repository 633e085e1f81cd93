// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/gemm/mlp_steps.h"

namespace moiety::gemm {

void sum_rows_cuda(const TensorView&, const TensorView&, const TensorView&, const TensorView&,
                   const Stream&) {
  fail_without_cuda("sum_rows");
}

}  // namespace moiety::gemm
