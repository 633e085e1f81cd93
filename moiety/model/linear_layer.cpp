#include "moiety/model/linear_layer.h"

#include "moiety/model/weight_layout.h"

namespace moiety::model {

void LinearLayer::bind(optim::Parameter* p) {
  p_ = p;
  gradient_id_ = tensor_id(p->spec.name + ".dy");
}

optim::ParamSpec LinearLayer::with_format(optim::ParamSpec spec) const {
  if (recipe_) spec.format = kept_format(*recipe_, spec.row_elements);
  return spec;
}

gemm::QuantizedLinear LinearLayer::linear(const Pass& pass) const {
  return {.recipe = recipe_ ? &*recipe_ : nullptr,
          .weight = {p_->quantized, p_->weight},
          .gradient_bits = {.rng = pass.rng, .tensor_id = gradient_id_}};
}

gemm::QuantizedLinear LinearLayer::quantized(const Pass& pass) const {
  gemm::QuantizedLinear out = linear(pass);
  out.gradient_bits.row0 = pass.first_token;
  out.gradient_bits.full_rows = pass.all_tokens;
  out.gradient_bits.col0 = tp_slice(layout_).rows.begin;
  out.gradient_bits.full_cols = layout_.rows;
  return out;
}

gemm::QuantizedLinear LinearLayer::quantized_experts(const Pass& pass, int32_t first_expert) const {
  gemm::QuantizedLinear out = linear(pass);
  out.gradient_bits.expert = first_expert + 1;
  return out;
}

void LinearLayer::forward(const Pass& pass, TensorView x, TensorView y, TensorView residual) const {
  if (!recipe_) return model::linear(x, p_->weight, y, residual, pass.stream);
  gemm::quantized_forward(quantized(pass), x, y, residual, pass.arena, pass.stream);
}

void LinearLayer::input_gradient(const Pass& pass, TensorView dy, TensorView dx) const {
  if (!recipe_) return linear_input_gradient(dy, p_->weight, dx, {}, pass.stream);
  gemm::quantized_input_gradient(quantized(pass), dy, dx, {}, pass.arena, pass.stream);
}

void LinearLayer::weight_gradient(const Pass& pass, TensorView dy, TensorView x) const {
  if (!recipe_) return add_weight_gradient(pass, dy, x, *p_);
  gemm::quantized_weight_gradient(quantized(pass), dy, x, p_->grad, take_accumulate(*p_),
                                  pass.arena, pass.stream);
  pass.stored(p_->spec.name, "gradient", p_->grad, dy, x);
}

}  // namespace moiety::model
