// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/moe/exchange_cuda.h"

namespace moiety::moe {

void prepare_cuda(const EpPlan&, const PrepareArgs&, Epoch, GpuState*, const Stream&) {
  fail_without_cuda("ep prepare");
}
void take_report_cuda(const TensorView&, GpuState*, const Stream&) {
  fail_without_cuda("ep take_report");
}
void copy_rows_cuda(const EpPlan&, const SourceRows&, const TensorView&, const ExpertRows&, bool,
                    const Stream&) {
  fail_without_cuda("ep dispatch");
}
void scale_rows_cuda(const EpPlan&, const ScaleRowsArgs&, const Stream&) {
  fail_without_cuda("ep combine_backward");
}
void sum_rows_cuda(const EpPlan&, const SumArgs&, const Stream&) {
  fail_without_cuda("ep combine");
}

}  // namespace moiety::moe
