#include "moiety/model/feed_forward.h"

#include <utility>

#include "moiety/model/block_ops.h"
#include "moiety/model/step_work.h"
#include "moiety/model/tensor_parallel.h"

namespace moiety::model {
namespace {

TensorView column(const TensorView& x_T) { return x_T.reshape({x_T.numel(), 1}); }

// The values of all tokens, given those of own tokens; absent values stay absent.
TensorView gather_values(const Pass& pass, TensorView own_T) {
  if (!own_T.defined()) return own_T;
  const TensorView all = gather_tokens(pass, column(own_T));
  return all.reshape({all.numel()});
}

}  // namespace

FeedForward::FeedForward(const Config& c, std::string prefix, int64_t ffn, TpPlace place)
    : prefix_(std::move(prefix)),
      activation_(c.activation),
      ffn_(ffn / place.size),
      hidden_(activation_.hidden(ffn_)),
      std_(c.init_std),
      out_std_(residual_std(c)),
      fc1_(fc1_layout(c, ffn, place)),
      fc2_(fc2_layout(c, ffn, place)) {}

std::vector<optim::ParamSpec> FeedForward::specs() const {
  // Files hold all rows of a gate, then all up rows; a rank has a part of each.
  const gtp::Layout& layout = fc1_.layout();
  const int64_t gate = layout.tp_rank * ffn_, up = layout.rows / 2 + gate;
  optim::ParamSpec fc1 = weight_spec(prefix_ + "fc1.weight", layout, std_);
  if (layout.tp_size > 1 && activation_.gated()) {
    fc1.row_map = {{0, 0, gate, ffn_}, {ffn_, 0, up, ffn_}};
  }
  return {fc1_.with_format(std::move(fc1)),
          fc2_.with_format(weight_spec(prefix_ + "fc2.weight", fc2_.layout(), out_std_))};
}

void FeedForward::bind(ParameterCursor& parameters) {
  fc1_.bind(parameters.next(prefix_ + "fc1.weight"));
  fc2_.bind(parameters.next(prefix_ + "fc2.weight"));
}

void FeedForward::set_recipe(const LinearRecipe& recipe) {
  fc1_.set_recipe(recipe);
  fc2_.set_recipe(recipe);
}

gtp::Work FeedForward::activation_work(const Pass& pass) const {
  return elementwise_work(pass.tokens() * (hidden_ + ffn_), pass.storage);
}

gemm::ActivationArgs FeedForward::activation(TensorView hidden, TensorView prob_T) const {
  return {.activation = activation_, .interleave = 0, .groups = {}, .h = hidden, .prob_R = prob_T};
}

TensorView FeedForward::make_hidden(const Pass& pass) const {
  return pass.tensor({pass.tokens(), hidden_});
}

TensorView FeedForward::hidden(const Pass& pass, TensorView h_TD, TensorView to) const {
  const TensorView hidden = to.defined() ? to : make_hidden(pass);
  ArenaScope input(pass.arena);
  const TensorView all_TD = gather_tokens(pass, h_TD);
  fc1_.forward(pass, all_TD, hidden, {});
  pass.stored("ffn.fc1", "hidden", hidden, all_TD, fc1_.parameter().weight);
  return hidden;
}

void FeedForward::activate(const Pass& pass, TensorView hidden, TensorView prob_T,
                           TensorView activated) const {
  ArenaScope temporaries(pass.arena);
  gemm::activation_forward(activation(hidden, gather_values(pass, prob_T)), activated, pass.stream);
  pass.note(activation_work(pass));
  pass.stored("ffn.activation", "a", activated, hidden);
}

TensorView FeedForward::forward(const Pass& pass, const Forward& a) const {
  const TensorView hidden = this->hidden(pass, a.h_TD, a.hidden);
  ArenaScope temporaries(pass.arena);
  const TensorView activated = pass.tensor({pass.tokens(), ffn_});
  activate(pass, hidden, a.prob_T, activated);
  forward_to_own(pass, fc2_, activated, a.out_TD, a.residual_TD);
  pass.stored("ffn.fc2", "x", a.out_TD, activated, fc2_.parameter().weight, a.residual_TD);
  return hidden;
}

void FeedForward::activation_backward(const Pass& pass, const Backward& a, TensorView hidden,
                                      TensorView d_activated, TensorView activated) const {
  ArenaScope temporaries(pass.arena);
  const TensorView prob_T = gather_values(pass, a.prob_T);
  const bool partial = pass.tp && a.dprob_T.defined();
  const TensorView dprob_T =
      partial ? pass.arena.tensor(DType::kFloat32, {pass.tokens()}) : a.dprob_T;
  gemm::activation_backward(activation(hidden, prob_T), d_activated, hidden, activated, dprob_T,
                            pass.stream);
  pass.note(activation_work(pass));
  pass.stored("ffn.activation", "dhidden", hidden, d_activated);
  if (partial) sum_to_own(pass, column(dprob_T), {}, column(a.dprob_T));
}

void FeedForward::backward(const Pass& pass, const Backward& a) const {
  ArenaScope temporaries(pass.arena);
  const TensorView hidden = a.hidden.defined() ? a.hidden : this->hidden(pass.again(), a.h_TD);
  const TensorView activated = a.needs.fc2 ? pass.tensor({pass.tokens(), ffn_}) : TensorView();
  {
    ArenaScope output(pass.arena);
    const TensorView dout_TD = gather_tokens(pass, a.dout_TD);
    if (a.needs.inner) {
      const TensorView d_activated = pass.tensor({pass.tokens(), ffn_});
      fc2_.input_gradient(pass, dout_TD, d_activated);
      pass.stored("ffn.fc2", "da", d_activated, dout_TD, fc2_.parameter().weight);
      activation_backward(pass, a, hidden, d_activated, activated);
    } else {
      activate(pass, hidden, a.prob_T, activated);
    }
    fc2_.weight_gradient(pass, dout_TD, activated);
  }
  if (a.needs.fc1) {
    ArenaScope input(pass.arena);
    fc1_.weight_gradient(pass, hidden, gather_tokens(pass, a.h_TD));
  }
  if (!a.needs.input) return;
  input_gradient_to_own(pass, fc1_, hidden, a.dh_TD);
  pass.stored("ffn.fc1", "dh", a.dh_TD, hidden, fc1_.parameter().weight);
}

DenseBlock::DenseBlock(const Config& c, int64_t layer, TpPlace place, const Frozen& frozen)
    : norm_name_(layer_prefix(layer) + "mlp_norm.weight"),
      d_model_(c.d_model),
      eps_(c.norm_eps),
      needs_(ffn_needs(c, frozen, layer)),
      ffn_(c, layer_prefix(layer) + "mlp.", c.d_ffn_dense, place) {}

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
  TensorView dh_TD;
  if (needs_.input) dh_TD = pass.tensor({x_TD.size(0), d_model_});
  if (needs_.network.reads_input(hidden.defined())) {
    apply_norm(pass, x_TD, *norm_, eps_, pass.h_TD);
  }
  if (needs_.network.any()) {
    ffn_.backward(pass, {.h_TD = pass.h_TD,
                         .prob_T = {},
                         .hidden = hidden,
                         .dout_TD = d_TD,
                         .dh_TD = dh_TD,
                         .dprob_T = {},
                         .needs = needs_.network});
  }
  if (!needs_.input) return;
  norm_gradient(pass, {x_TD, dh_TD, d_TD, d_TD}, eps_, *norm_);
}

}  // namespace moiety::model
