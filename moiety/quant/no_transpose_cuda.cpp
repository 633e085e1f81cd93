// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/quant/convert/transpose_cuda.h"

namespace moiety::quant {

std::shared_ptr<const TransposeTable> make_transpose_table(std::span<const TransposeJob>, Device) {
  fail_without_cuda("transpose_quantized");
}
void transpose_cuda(const TransposeTable&, const Stream&) {
  fail_without_cuda("transpose_quantized");
}

}  // namespace moiety::quant
