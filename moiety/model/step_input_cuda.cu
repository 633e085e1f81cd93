#include "moiety/base/launch.cuh"
#include "moiety/model/step_input.h"

namespace moiety::model::detail {
namespace {

__global__ void set_words(StepInput input) { input.set(); }

}  // namespace

void set_step_input_cuda(const StepInput& input, const Stream& stream) {
  launch("step_input", set_words, {1, 1}, stream, input);
}

}  // namespace moiety::model::detail
