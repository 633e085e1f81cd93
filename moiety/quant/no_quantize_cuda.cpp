// Linked where CUDA is not built. Tensors on a GPU cannot be made there, so nothing comes this far.
#include "moiety/base/gpu.h"
#include "moiety/quant/quantize/quantize_cuda.h"

namespace moiety::quant {

void measure_cuda(const QuantizeJob&, const Stream&) { fail_without_cuda("compute_amax"); }
void quantize_cuda(const QuantizeJob&, const Stream&) { fail_without_cuda("quantize"); }
void measure_groups_cuda(const QuantizeJob&, const RowGroups&, const Stream&) {
  fail_without_cuda("compute_amax_grouped");
}
void quantize_groups_cuda(const QuantizeJob&, const RowGroups&, const Stream&) {
  fail_without_cuda("quantize_grouped");
}
std::shared_ptr<const QuantizeTable::Device> make_device_table(std::span<const QuantizeJob>,
                                                               moiety::Device) {
  fail_without_cuda("quantize_many");
}
void quantize_many_cuda(const QuantizeTable::Device&, const Stream&) {
  fail_without_cuda("quantize_many");
}

}  // namespace moiety::quant
