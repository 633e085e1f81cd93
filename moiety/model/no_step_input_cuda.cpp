// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/model/step_input.h"

namespace moiety::model::detail {

void set_step_input_cuda(const StepInput&, const Stream&) { fail_without_cuda("step_input"); }

}  // namespace moiety::model::detail
