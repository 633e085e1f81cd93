#include "moiety/model/feed_forward.h"

#include <utility>

#include "moiety/gemm/swiglu.h"
#include "moiety/model/block_ops.h"

namespace moiety::model {
namespace {

gemm::ActivationArgs swiglu_args(TensorView hidden, TensorView prob_T) {
  return {
      .activation = gemm::swiglu(), .interleave = 0, .groups = {}, .h = hidden, .prob_R = prob_T};
}

}  // namespace

FeedForward::FeedForward(const Config& c, std::string prefix, int64_t ffn)
    : prefix_(std::move(prefix)),
      d_model_(c.d_model),
      ffn_(ffn),
      std_(c.init_std),
      out_std_(residual_std(c)) {}

std::vector<optim::ParamSpec> FeedForward::specs() const {
  return {fc1_.with_format(matrix_spec(prefix_ + "fc1.weight", 2 * ffn_, d_model_, std_)),
          fc2_.with_format(matrix_spec(prefix_ + "fc2.weight", d_model_, ffn_, out_std_))};
}

void FeedForward::bind(ParameterCursor& parameters) {
  fc1_.bind(parameters.next(prefix_ + "fc1.weight"));
  fc2_.bind(parameters.next(prefix_ + "fc2.weight"));
}

void FeedForward::set_recipe(const std::optional<gemm::Recipe>& recipe) {
  fc1_.set_recipe(recipe);
  fc2_.set_recipe(recipe);
}

TensorView FeedForward::hidden(const Pass& pass, TensorView h_TD) const {
  const TensorView hidden = pass.tensor({h_TD.size(0), 2 * ffn_});
  fc1_.forward(pass, h_TD, hidden, {});
  pass.stored("ffn.fc1", "hidden", hidden, h_TD, fc1_.parameter().weight);
  return hidden;
}

TensorView FeedForward::forward(const Pass& pass, const Forward& a) const {
  const TensorView hidden = this->hidden(pass, a.h_TD);
  ArenaScope temporaries(pass.arena);
  const TensorView activated = pass.tensor({a.h_TD.size(0), ffn_});
  gemm::activation_forward(swiglu_args(hidden, a.prob_T), activated, pass.stream);
  pass.stored("ffn.swiglu", "a", activated, hidden);
  fc2_.forward(pass, activated, a.out_TD, a.residual_TD);
  pass.stored("ffn.fc2", "x", a.out_TD, activated, fc2_.parameter().weight, a.residual_TD);
  return hidden;
}

void FeedForward::backward(const Pass& pass, const Backward& a) const {
  ArenaScope temporaries(pass.arena);
  const int64_t tokens = a.h_TD.size(0);
  const TensorView hidden = a.hidden.defined() ? a.hidden : this->hidden(pass, a.h_TD);
  const TensorView activated = pass.tensor({tokens, ffn_});
  const TensorView d_activated = pass.tensor({tokens, ffn_});
  fc2_.input_gradient(pass, a.dout_TD, d_activated);
  pass.stored("ffn.fc2", "da", d_activated, a.dout_TD, fc2_.parameter().weight);
  gemm::activation_backward(swiglu_args(hidden, a.prob_T), d_activated, hidden, activated,
                            a.dprob_T, pass.stream);
  pass.stored("ffn.swiglu", "dhidden", hidden, d_activated);
  fc2_.weight_gradient(pass, a.dout_TD, activated);
  fc1_.weight_gradient(pass, hidden, a.h_TD);
  fc1_.input_gradient(pass, hidden, a.dh_TD);
  pass.stored("ffn.fc1", "dh", a.dh_TD, hidden, fc1_.parameter().weight);
}

DenseBlock::DenseBlock(const Config& c, int64_t layer)
    : norm_name_(layer_prefix(layer) + "mlp_norm.weight"),
      d_model_(c.d_model),
      eps_(c.norm_eps),
      ffn_(c, layer_prefix(layer) + "mlp.", c.d_ffn_dense) {}

std::vector<optim::ParamSpec> DenseBlock::specs() const {
  std::vector<optim::ParamSpec> specs = ffn_.specs();
  specs.insert(specs.begin(), norm_spec(norm_name_, d_model_));
  return specs;
}

void DenseBlock::bind(ParameterCursor& parameters) {
  norm_ = parameters.next(norm_name_);
  ffn_.bind(parameters);
}

TensorView DenseBlock::forward(const Pass& pass, TensorView x_TD, TensorView out_TD) const {
  apply_norm(pass, x_TD, *norm_, eps_, pass.h_TD);
  return ffn_.forward(pass,
                      {.h_TD = pass.h_TD, .prob_T = {}, .residual_TD = x_TD, .out_TD = out_TD});
}

void DenseBlock::backward(const Pass& pass, TensorView x_TD, TensorView hidden,
                          TensorView d_TD) const {
  ArenaScope temporaries(pass.arena);
  const TensorView dh_TD = pass.tensor({x_TD.size(0), d_model_});
  apply_norm(pass, x_TD, *norm_, eps_, pass.h_TD);
  ffn_.backward(pass, {.h_TD = pass.h_TD,
                       .prob_T = {},
                       .hidden = hidden,
                       .dout_TD = d_TD,
                       .dh_TD = dh_TD,
                       .dprob_T = {}});
  norm_gradient(pass, {x_TD, dh_TD, d_TD, d_TD}, eps_, *norm_);
}

}  // namespace moiety::model
