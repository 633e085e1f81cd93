#include "moiety/model/step_input.h"

namespace moiety::model {

void set_step_input(const StepSums& sums, bool refuses_drops, TensorView words, Stream stream) {
  check_tensor("step_input", "words", words, DType::kFloat64, {kStepInputWords});
  check_device("step_input", "words", words, stream);
  check_device("step_input", "sums", sums.memory(), stream);
  const detail::StepInput input{.loss_3 = sums.loss_3().data<double>(),
                                .count_2 = sums.count_2().data<int64_t>(),
                                .layer_L4 = sums.layer_L4().data<int64_t>(),
                                .layers = sums.layer_L4().size(0),
                                .refuses_drops = refuses_drops,
                                .words = words.data<double>()};
  if (stream.device().type == DeviceType::kCuda) return detail::set_step_input_cuda(input, stream);
  stream.run([input] { input.set(); });
}

}  // namespace moiety::model
