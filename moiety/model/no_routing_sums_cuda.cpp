// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/model/routing_sums.h"

namespace moiety::model {

void count_targets_cuda(const TargetCount&, const Stream&) { fail_without_cuda("count_targets"); }
void add_counts_cuda(const RoutingCounts&, const StepSums&, const Stream&) {
  fail_without_cuda("add_counts");
}
void sum_layers_cuda(TensorView, TensorView, const Stream&) { fail_without_cuda("sum_layers"); }
void add_routing_losses_cuda(TensorView, TensorView, const StepSums&, const Stream&) {
  fail_without_cuda("add_routing_losses");
}
void add_losses_cuda(TensorView, const StepSums&, const Stream&) {
  fail_without_cuda("add_losses");
}

}  // namespace moiety::model
