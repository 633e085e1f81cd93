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

GroupedLinear::GroupedLinear(std::string name, const QuantizedLinear& linear, TensorView bias_EN,
                             LinearNeeds needs)
    : name_(std::move(name)), quantized_(linear), bias_(std::move(bias_EN)), needs_(needs) {
  MOIETY_CHECK(linear.recipe, "grouped linear {}: there is no recipe", name_);
  MOIETY_CHECK(!linear.weight.quantized.empty() || linear.weight.values.dims() > 0,
               "grouped linear {}: there is no weight", name_);
  quantized_->rows = quantized_->columns = {};
  needs_.db = needs_.db && bias_.defined();
  needs_.dprob = needs_.dprob && bias_.defined();
}

GroupedLinear::~GroupedLinear() {
  if (jobs_.empty()) return;
  log(LogLevel::kError, "grouped linear {}: ends with {} weight gradients that wait", name_,
      pending());
}

Arena& GroupedLinear::temporaries(Arena* arena) const {
  MOIETY_CHECK(arena, "grouped linear {}: products of quantized operands need an arena", name_);
  return *arena;
}

void GroupedLinear::forward(const Forward& a, Stream stream) const {
  if (quantized_) {
    Arena& arena = temporaries(a.arena);
    quantized_grouped_forward(*quantized_, a.groups, a.x, a.y, bias_, a.prob_R, arena, stream);
    if (!keeps_columns()) return;
    MOIETY_CHECK(a.columns.col_data.defined(),
                 "grouped linear {}: forward has no place for x's columns, which the weight's "
                 "gradient reads",
                 name_);
    return make_columns(*quantized_, a.groups, a.x, a.columns, arena, stream);
  }
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
  MOIETY_CHECK(!keeps_x() || a.x.data.defined(),
               "grouped linear {}: backward without x, which the weight's gradient reads", name_);
  MOIETY_CHECK(!keeps_columns() || a.columns.col_data.defined(),
               "grouped linear {}: backward without x's columns, which the weight's gradient reads",
               name_);
  MOIETY_CHECK(!needs_.db || bias_target_.grad_EN.defined(),
               "grouped linear {}: the bias's gradient has no target", name_);
  if (needs_.dx) input_gradient(a, stream);
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
  if (needs_.dw) {
    jobs_.push_back({a.groups, a.dy, a.x, a.memory, a.columns, a.gradient_bits});
  }
}

void GroupedLinear::input_gradient(const Backward& a, const Stream& stream) const {
  if (!quantized_) {
    return grouped_gemm(
        {.op = GroupedOp::kDgrad, .groups = a.groups, .a = a.dy, .w = weight_, .out = a.dx},
        stream);
  }
  QuantizedLinear linear = *quantized_;
  linear.gradient_bits = a.gradient_bits;
  quantized_grouped_input_gradient(linear, a.groups, a.dy, a.dx, temporaries(a.arena), stream);
}

void GroupedLinear::weight_gradient(const Job& job, Arena* arena, const Stream& stream) const {
  const GradTarget& into = weight_target_.into;
  if (!quantized_) {
    return grouped_gemm({.op = GroupedOp::kWgrad,
                         .groups = job.groups,
                         .a = job.dy,
                         .b = job.x,
                         .w = into.grad,
                         .beta = into.beta},
                        stream);
  }
  QuantizedLinear linear = *quantized_;
  linear.gradient_bits = job.gradient_bits;
  linear.columns = job.columns;
  // Nothing but the width of x counts, which the weight has too.
  const TensorView x(nullptr, DType::kBFloat16, {job.groups.capacity, linear.weight.columns()},
                     job.dy.data.device());
  quantized_grouped_weight_gradient(linear, job.groups, job.dy, {x}, into.grad, into.beta,
                                    temporaries(arena), stream);
}

void GroupedLinear::backward_weights(Stream stream, Arena* arena) {
  MOIETY_CHECK(!jobs_.empty(), "grouped linear {}: no weight gradient waits", name_);
  weight_gradient(jobs_.front(), arena, stream);
  weight_target_.ready.record(stream);
  ++weight_target_.contributions;
  jobs_.pop_front();
}

void GroupedLinear::check_idle(const char* before) const {
  MOIETY_CHECK(jobs_.empty(), "{}: {} weight gradients of grouped linear {} wait", before,
               pending(), name_);
}

}  // namespace moiety::gemm
