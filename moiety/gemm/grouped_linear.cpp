#include "moiety/gemm/grouped_linear.h"

#include <utility>

#include "moiety/base/error.h"
#include "moiety/base/log.h"

namespace moiety::gemm {

GroupedLinear::GroupedLinear(std::string name, GroupedWeight weight_ENC, TensorView bias_EN,
                             LinearNeeds needs)
    : name_(std::move(name)),
      weight_(std::move(weight_ENC)),
      bias_(std::move(bias_EN)),
      needs_(needs) {
  MOIETY_CHECK(weight_.defined(), "grouped linear {}: there is no weight", name_);
  needs_.db = needs_.db && bias_.defined();
  needs_.dprob = needs_.dprob && bias_.defined();
}

GroupedLinear::~GroupedLinear() {
  if (jobs_.empty()) return;
  log(LogLevel::kError, "grouped linear {}: ends with {} weight gradients that wait", name_,
      pending());
}

void GroupedLinear::forward(const Forward& a, Stream stream) const {
  grouped_gemm({.op = GroupedOp::kForward,
                .groups = a.groups,
                .a = a.x,
                .w = weight_,
                .out = a.y,
                .bias_EN = bias_,
                .bias_scale_R = a.prob_R},
               std::move(stream));
}

void GroupedLinear::backward_data(const Backward& a, Stream stream) {
  MOIETY_CHECK(!needs_.dw || weight_target_.into.grad.defined(),
               "grouped linear {}: the weight's gradient has no target", name_);
  MOIETY_CHECK(!needs_.dw || a.x.data.defined(),
               "grouped linear {}: backward without x, which the weight's gradient reads", name_);
  MOIETY_CHECK(!needs_.db || bias_target_.grad_EN.defined(),
               "grouped linear {}: the bias's gradient has no target", name_);
  if (needs_.dx) {
    grouped_gemm(
        {.op = GroupedOp::kDgrad, .groups = a.groups, .a = a.dy, .w = weight_, .out = a.dx},
        stream);
  }
  if (needs_.db) {
    grouped_bias_grad({.groups = a.groups,
                       .dy = a.dy,
                       .scale_R = a.prob_R,
                       .dbias_EN = bias_target_.grad_EN,
                       .beta = bias_target_.beta},
                      stream);
    bias_target_.ready.record(stream);
    ++bias_target_.contributions;
  }
  if (needs_.dprob && a.prob_R.defined()) {
    grouped_scale_grad({.groups = a.groups, .dy = a.dy, .bias_EN = bias_, .dscale_R = a.dprob_R},
                       stream);
  }
  if (needs_.dw) jobs_.push_back({a.groups, a.dy, a.x, a.memory});
}

void GroupedLinear::backward_weights(Stream stream) {
  MOIETY_CHECK(!jobs_.empty(), "grouped linear {}: no weight gradient waits", name_);
  const Job& job = jobs_.front();
  grouped_gemm({.op = GroupedOp::kWgrad,
                .groups = job.groups,
                .a = job.dy,
                .b = job.x,
                .w = weight_target_.into.grad,
                .beta = weight_target_.into.beta},
               stream);
  weight_target_.ready.record(stream);
  ++weight_target_.contributions;
  jobs_.pop_front();
}

void GroupedLinear::check_idle(const char* before) const {
  MOIETY_CHECK(jobs_.empty(), "{}: {} weight gradients of grouped linear {} wait", before,
               pending(), name_);
}

}  // namespace moiety::gemm
