// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/optim/adamw_table.h"

namespace moiety::optim::detail {

class AdamWDeviceTable {};

std::shared_ptr<const AdamWDeviceTable> make_device_table(std::span<const AdamWArgs>, Device) {
  fail_without_cuda("adamw");
}
void adamw_cuda(const AdamWConstants&, TensorView, const AdamWDeviceTable&, const Stream&) {
  fail_without_cuda("adamw");
}

}  // namespace moiety::optim::detail
