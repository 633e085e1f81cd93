#include "moiety/model/step_input.h"

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"

namespace moiety::model {

void set_step_input(const StepSums& sums, bool refuses_drops, TensorView words, Stream stream) {
  check_tensor("step_input", "words", words, DType::kFloat64, {kStepInputWords});
  const bool gpu = check_devices("step_input", {{"words", words}, {"sums", sums.memory()}}, stream);
  const detail::StepInput input{.loss_3 = sums.loss_3().data<double>(),
                                .count_2 = sums.count_2().data<int64_t>(),
                                .layer_L4 = sums.layer_L4().data<int64_t>(),
                                .layers = sums.layer_L4().size(0),
                                .refuses_drops = refuses_drops,
                                .words = words.data<double>()};
  if (gpu) {
    if constexpr (kCudaBuilt) return detail::set_step_input_cuda(input, stream);
    fail_without_cuda("step_input");
  }
  stream.run([input] { input.set(); });
}

}  // namespace moiety::model
