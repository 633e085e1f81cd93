// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/quant/delayed_scaling_cuda.h"

namespace moiety::quant::detail {

std::shared_ptr<const DelayedScalingTable::Device> make_delayed_scaling_table(
    std::span<const DelayedScalingItem>, AmaxAlgorithm, int, moiety::Device) {
  fail_without_cuda("DelayedScalingTable");
}
void update_delayed_scales_cuda(const DelayedScalingTable::Device&, const Stream&) {
  fail_without_cuda("update_delayed_scales");
}
void oldest_first_cuda(const DelayedScaling&, const TensorView&, const Stream&) {
  fail_without_cuda("oldest_first");
}

}  // namespace moiety::quant::detail
