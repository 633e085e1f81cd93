// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/gemm/quantized_operand_cuda.h"

namespace moiety::gemm {

void operand_groups_cuda(const Groups&, int64_t, const Groups&, const Stream&) {
  fail_without_cuda("quantized operand");
}

}  // namespace moiety::gemm
