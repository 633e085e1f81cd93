// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/optim/step_combine.h"

namespace moiety::optim::detail {

void pack_words_cuda(const GradStatistics*, const double*, int64_t, double*, const Stream&) {
  fail_without_cuda("pack_words");
}
void step_rule_cuda(const StepRuleJob&, const Stream&) { fail_without_cuda("step_rule"); }

}  // namespace moiety::optim::detail
