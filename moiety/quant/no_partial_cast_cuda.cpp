// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/quant/partial_cast/partial_cast_cuda.h"

namespace moiety::quant::detail {

std::shared_ptr<const PartialGpuTable> make_partial_gpu_table(const PartialCastTable::Impl&,
                                                              Device) {
  fail_without_cuda("PartialCastTable");
}
void partial_amax_cuda(const PartialGpuTable&, const TensorView&, const Stream&) {
  fail_without_cuda("partial_amax");
}
void partial_cast_cuda(const PartialGpuTable&, const TensorView&, const Stream&) {
  fail_without_cuda("partial_cast");
}

}  // namespace moiety::quant::detail
