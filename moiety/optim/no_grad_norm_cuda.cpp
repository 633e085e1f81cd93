// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/optim/grad_norm_table.h"

namespace moiety::optim::detail {

class GradDeviceTable {};

std::shared_ptr<const GradDeviceTable> make_device_table(std::span<const GradSegment>, Device) {
  fail_without_cuda("grad_statistics");
}
void grad_statistics_cuda(const GradDeviceTable&, TensorView, const Stream&) {
  fail_without_cuda("grad_statistics");
}

}  // namespace moiety::optim::detail
