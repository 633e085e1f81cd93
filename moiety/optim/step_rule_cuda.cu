#include "moiety/base/launch.cuh"
#include "moiety/optim/step_combine.h"

namespace moiety::optim::detail {
namespace {

__global__ void pack_kernel(const GradStatistics* statistics, const double* input, int64_t losses,
                            double* words) {
  pack(*statistics, input, losses, words);
}

__global__ void rule_kernel(const StepRuleJob job) { run_step_rule(job); }

}  // namespace

void pack_words_cuda(const GradStatistics* statistics, const double* input, int64_t losses,
                     double* words, const Stream& stream) {
  launch("pack_words", pack_kernel, {1, 1}, stream, statistics, input, losses, words);
}

void step_rule_cuda(const StepRuleJob& job, const Stream& stream) {
  launch("step_rule", rule_kernel, {1, 1}, stream, job);
}

}  // namespace moiety::optim::detail
