#include "moiety/model/linear_layer.h"

#include "moiety/model/step_work.h"
#include "moiety/model/weight_layout.h"
#include "moiety/model/weights.h"

namespace moiety::model {

void LinearLayer::bind(optim::Parameter* p) {
  p_ = p;
  gradient_id_ = tensor_id(p->spec.name + ".dy");
}

optim::ParamSpec LinearLayer::with_format(optim::ParamSpec spec) const {
  if (recipe_) spec.format = kept_format(*recipe_, spec.row_elements);
  return spec;
}

gemm::QuantizedLinear LinearLayer::linear(const Pass& pass,
                                          const gemm::LinearWeight& weight) const {
  gemm::QuantizedLinear out{.recipe = recipe_ ? &*recipe_ : nullptr,
                            .weight = weight,
                            .gradient_bits = {.rng = pass.rng, .tensor_id = gradient_id_}};
  if (recipe_ && scales_) {
    out.input_scaling = &scales_->input(p_->spec.name, pass.records_amax);
    out.gradient_scaling = &scales_->gradient(p_->spec.name);
  }
  return out;
}

gemm::QuantizedLinear LinearLayer::quantized(const Pass& pass,
                                             const gemm::LinearWeight& weight) const {
  gemm::QuantizedLinear out = linear(pass, weight);
  out.gradient_bits.row0 = pass.first_token;
  out.gradient_bits.full_rows = pass.all_tokens;
  out.gradient_bits.col0 = tp_slice(layout_).rows.begin;
  out.gradient_bits.full_cols = layout_.rows;
  return out;
}

gemm::QuantizedLinear LinearLayer::quantized_experts(const Pass& pass,
                                                     const gemm::LinearWeight& weight,
                                                     int32_t first_expert) const {
  gemm::QuantizedLinear out = linear(pass, weight);
  out.gradient_bits.expert = first_expert + 1;
  return out;
}

gtp::Work LinearLayer::work(const Pass& pass, int64_t rows) const {
  return product_work(rows, layout_.slice_rows(), layout_.slice_cols(), pass.storage);
}

gemm::LinearWeight LinearLayer::read(const Pass& pass, gtp::Phase phase, int64_t rows) const {
  return read_weight(pass, *p_, phase, work(pass, rows));
}

void LinearLayer::forward(const Pass& pass, TensorView x, TensorView y, TensorView residual) const {
  const gemm::LinearWeight w = read(pass, pass.phase, x.size(0));
  if (!recipe_) return nn::linear(x, w.values, y, residual, pass.stream);
  gemm::quantized_forward(quantized(pass, w), x, y, residual, pass.arena, pass.stream);
}

void LinearLayer::input_gradient(const Pass& pass, TensorView dy, TensorView dx) const {
  const gemm::LinearWeight w = read(pass, gtp::Phase::kBwd, dy.size(0));
  if (!recipe_) return nn::linear_input_gradient(dy, w.values, dx, {}, pass.stream);
  gemm::quantized_input_gradient(quantized(pass, w), dy, dx, {}, pass.arena, pass.stream);
}

void LinearLayer::weight_gradient(const Pass& pass, TensorView dy, TensorView x) const {
  if (!p_->trained()) return;
  if (!recipe_) return add_weight_gradient(pass, dy, x, *p_);
  const OpenGradient grad = open_gradient(pass, *p_, work(pass, dy.size(0)));
  gemm::quantized_weight_gradient(quantized(pass, {}), dy, x, grad.view, grad.accumulate,
                                  pass.arena, pass.stream);
  pass.stored(p_->spec.name, "gradient", grad.view, dy, x);
  close_gradient(pass, *p_);
}

}  // namespace moiety::model
