#include "moiety/model/moe_block.h"

#include <utility>

#include "moiety/base/copy.h"
#include "moiety/model/block_ops.h"
#include "moiety/nn/elementwise.h"

namespace moiety::model {
moe::MoeConfig moe_config(const Config& c, DType storage) {
  return {.dtype = storage,
          .model = c.d_model,
          .ffn = c.d_ffn,
          .router = c.router,
          .activation = c.activation,
          .interleave = c.glu_interleave,
          .path = c.path,
          .reduction = c.combine,
          .overflow = c.overflow,
          .overlap = c.overlap,
          .layout = c.row_layout};
}

MoeBlock::MoeBlock(const Config& c, DType storage, int64_t layer, moe::EpGroup& group,
                   TpPlace place, const Frozen& frozen)
    : prefix_(layer_prefix(layer)),
      index_(layer),
      d_model_(c.d_model),
      d_ffn_(c.d_ffn),
      eps_(c.norm_eps),
      std_(c.init_std),
      out_std_(residual_std(c)),
      group_(&group),
      layer_(moe_config(c, storage), group),
      bias_E_(DType::kFloat32, {c.router.experts}, group.device(), "router bias"),
      gated_(c.shared_gate),
      indexed_(c.indexed_experts),
      biased_(c.expert_bias),
      needs_(ffn_needs(c, frozen, layer)) {
  if (c.shared_d_ffn > 0) shared_.emplace(c, prefix_ + "moe.shared.", c.shared_d_ffn, place);
}

// Completes the spec of a tensor of this rank's experts, in their local order, each with so many
// rows of the matrix. With a `block` an expert's rows are blocks of that many, in turn of the first
// and of the second half of its rows in the tensor.
optim::ParamSpec MoeBlock::own_experts(optim::ParamSpec spec, int64_t rows, int64_t block) const {
  spec.row_map.clear();
  int64_t at = 0;
  for (const int32_t expert : group_->map().experts_of(group_->rank())) {
    const int64_t end = at + rows, first = expert * rows;
    if (block == 0) spec.row_map.push_back({at, 0, first, rows});
    for (int64_t b = 0; b < (block > 0 ? rows / 2 : 0); b += block) {
      spec.row_map.push_back({at + 2 * b, 0, first + b, block});
      spec.row_map.push_back({at + 2 * b + block, 0, first + rows / 2 + b, block});
    }
    at = end;
  }
  spec.expert = true;
  spec.kind = optim::ParameterClass::kExpert;
  return spec;
}

optim::ParamSpec MoeBlock::expert_spec(const char* name, int64_t rows, int64_t columns, float std,
                                       int64_t interleave) const {
  const int64_t local = group_->local_experts();
  optim::ParamSpec spec =
      matrix_spec(prefix_ + "moe.experts." + name + ".weight", local * rows, columns, std);
  spec.tensors[0].shape = {group_->map().experts(), rows, columns};
  spec.shape = {local, rows, columns};
  spec.layout = gtp::Layout{.rows = rows, .cols = columns};
  spec.domain = {gtp::Axis::kEdp};
  return own_experts(std::move(spec), rows, interleave);
}

// A vector for each expert. It is small: egtp does not cut it.
optim::ParamSpec MoeBlock::bias_spec(const char* name, int64_t columns, int64_t interleave) const {
  const int64_t local = group_->local_experts(), width = interleave > 0 ? interleave : columns;
  optim::ParamSpec spec =
      matrix_spec(prefix_ + "moe.experts." + name + ".bias", local * columns / width, width, 0);
  spec.tensors[0].shape = {group_->map().experts(), columns};
  spec.tensors[0].columns = width;
  spec.shape = {local, columns};
  spec.init = optim::InitKind::kZeros;
  spec.decay = false;
  spec.domain = {gtp::Axis::kEgtp, gtp::Axis::kEdp};
  return own_experts(std::move(spec), columns / width, interleave > 0 ? 1 : 0);
}

std::vector<optim::ParamSpec> MoeBlock::specs() const {
  const int64_t hidden = layer_.config().activation.hidden(d_ffn_);
  const int64_t interleave = layer_.config().interleave;
  optim::ParamSpec router =
      matrix_spec(prefix_ + "moe.router.weight", group_->map().experts(), d_model_, std_);
  router.kind = optim::ParameterClass::kRouter;
  std::vector<optim::ParamSpec> specs{
      norm_spec(prefix_ + "mlp_norm.weight", d_model_), router,
      fc1_.with_format(expert_spec("fc1", hidden, d_model_, std_, interleave)),
      fc2_.with_format(expert_spec("fc2", d_model_, d_ffn_, out_std_, 0))};
  if (biased_) {
    specs.push_back(bias_spec("fc1", hidden, interleave));
    specs.push_back(bias_spec("fc2", d_model_, 0));
  }
  if (shared_) {
    for (const optim::ParamSpec& spec : shared_->specs()) specs.push_back(spec);
    if (gated_) specs.push_back(matrix_spec(prefix_ + "moe.shared.gate.weight", 1, d_model_, std_));
  }
  return specs;
}

void MoeBlock::bind(ParameterCursor& parameters) {
  norm_ = parameters.next(prefix_ + "mlp_norm.weight");
  router_ = parameters.next(prefix_ + "moe.router.weight");
  fc1_.bind(parameters.next(prefix_ + "moe.experts.fc1.weight"));
  fc2_.bind(parameters.next(prefix_ + "moe.experts.fc2.weight"));
  if (biased_) {
    b1_ = parameters.next(prefix_ + "moe.experts.fc1.bias");
    b2_ = parameters.next(prefix_ + "moe.experts.fc2.bias");
  }
  if (shared_) {
    shared_->bind(parameters);
    if (gated_) gate_ = parameters.next(prefix_ + "moe.shared.gate.weight");
  }
}

void MoeBlock::set_recipe(const LinearRecipe& recipe, const std::optional<QuantSpec>& dispatch) {
  layer_.set_dispatch(dispatch);
  layer_.set_kept(recipe.recipe ? std::optional(recipe.recipe->input) : std::nullopt);
  fc1_.set_recipe(recipe);
  fc2_.set_recipe(recipe);
  if (shared_) shared_->set_recipe(recipe);
}

moe::MoeWeights MoeBlock::weights(const Pass& pass, const gemm::LinearWeight& w1,
                                  const gemm::LinearWeight& w2) const {
  // The experts of a rank are consecutive.
  const std::span<const int32_t> own = group_->map().experts_of(group_->rank());
  const int32_t first = own.empty() ? 0 : own[0];
  return {.router_ED = router_->weight,
          .router_bias_E = bias_E_,
          .w1 = grouped(w1.values),
          .w2 = grouped(w2.values),
          .quantized_1 = fc1_.quantized_experts(pass, w1, first),
          .quantized_2 = fc2_.quantized_experts(pass, w2, first),
          .b1_LH = biased_ ? b1_->weight : TensorView(),
          .b2_LD = biased_ ? b2_->weight : TensorView()};
}

// The experts' matrices as the products take them. Weights without data are only asked for shapes.
gemm::GroupedWeight MoeBlock::grouped(const TensorView& packed_LNK) const {
  if (!indexed_ || !packed_LNK.raw()) return packed_LNK;
  return gemm::GroupedWeight::split(packed_LNK);
}

gemm::GradTarget MoeBlock::target(const OpenGradient& gradient) const {
  if (!gradient.view.defined()) return {};
  return {.grad = grouped(gradient.view), .beta = {gradient.accumulate ? 1.0f : 0.0f, {}}};
}

gtp::Work MoeBlock::fc1_work(const Pass& pass, int64_t rows) const {
  return product_work(rows, layer_.config().activation.hidden(d_ffn_), d_model_, pass.storage,
                      group_->local_experts());
}

gtp::Work MoeBlock::fc2_work(const Pass& pass, int64_t rows) const {
  return product_work(rows, d_model_, d_ffn_, pass.storage, group_->local_experts());
}

gtp::Work MoeBlock::router_work(const Pass& pass) const {
  return product_work(pass.own_tokens(), group_->map().experts(), d_model_, pass.storage);
}

gtp::Work MoeBlock::exchange_work(const Pass& pass, const std::optional<QuantSpec>& format) const {
  return model::exchange_work({.tokens = pass.own_tokens(),
                               .d = d_model_,
                               .experts = group_->map().experts(),
                               .top_k = layer_.config().router.top_k,
                               .ranks = group_->ranks()},
                              pass.storage, format);
}

gtp::Work MoeBlock::activation_work(const Pass& pass) const {
  const int64_t columns = layer_.config().activation.hidden(d_ffn_) + d_ffn_;
  return elementwise_work(pairs(pass.h_TD) * columns, pass.storage);
}

moe::MoeWeights MoeBlock::read_weights(const Pass& pass, gtp::Phase phase, int64_t rows) const {
  gtp::Work work = fc2_work(pass, rows);
  work += fc1_work(pass, rows);
  const auto [w1, w2] =
      model::read_weights(pass, {&fc1_.parameter(), &fc2_.parameter()}, phase, work);
  return weights(pass, w1, w2);
}

void MoeBlock::forward(const Pass& pass, const Forward& a, Saved* saved) const {
  ForwardPass p;
  begin_forward(pass, a, p);
  forward_experts(pass, p);
  end_forward(pass, p, saved);
}

void MoeBlock::begin_forward(const Pass& pass, const Forward& a, ForwardPass& p) const {
  p.args = a;
  apply_norm(pass, a.x_TD, *norm_, eps_, pass.h_TD);
  p.shared_beside = shared_ && layer_.overlaps(moe::Overlap::kShared);
  if (p.shared_beside) make_shared(pass, a, p.saved);
  const TensorView addend = p.shared_beside ? pass.wide_TD
                            : shared_       ? add_shared(pass, a, p.saved)
                                            : a.x_TD;
  layer_.begin_forward({.weights = router_weights(),
                        .h_TD = pass.h_TD,
                        .mask_T = pass.routed_T,
                        .addend = addend,
                        .capacity = a.capacity,
                        .out_TD = a.out_TD,
                        .stats = a.stats,
                        .info = a.info,
                        .frozen_w1 = !needs_.fc1,
                        .recompute = a.recompute,
                        .probe = pass.probe,
                        .exchange = pass.exchange},
                       p.experts, pass.arena, pass.stream);
}

// The order of the weights that are read is the same: the shared expert's, then the experts'.
void MoeBlock::forward_experts(const Pass& pass, ForwardPass& p) const {
  if (p.shared_beside) add_shared(pass, p.args, p.saved);
  layer_.forward_experts(read_weights(pass, pass.phase, pairs(p.args.x_TD)), p.experts);
}

void MoeBlock::end_forward(const Pass& pass, ForwardPass& p, Saved* saved) const {
  layer_.end_forward(p.experts, saved ? &p.saved.experts : nullptr);
  pass.note(router_work(pass));
  pass.note(exchange_work(pass, layer_.dispatch_format()));
  pass.note(activation_work(pass));
  pass.note(exchange_work(pass));
  if (saved) *saved = p.saved;
}

moe::MoeWeights MoeBlock::router_weights() const {
  moe::MoeWeights weights;
  weights.router_ED = router_->weight;
  weights.router_bias_E = bias_E_;
  return weights;
}

void MoeBlock::make_shared(const Pass& pass, const Forward& a, Saved& saved) const {
  if (gated_) saved.gate_T = pass.arena.tensor(DType::kFloat32, {a.x_TD.size(0)});
  if (!a.recompute) saved.shared_hidden = shared_->make_hidden(pass);
}

TensorView MoeBlock::add_shared(const Pass& pass, const Forward& a, Saved& saved) const {
  const int64_t tokens = a.x_TD.size(0);
  if (gated_) {
    if (!saved.gate_T.defined()) saved.gate_T = pass.arena.tensor(DType::kFloat32, {tokens});
    const TensorView logit_T1 = saved.gate_T.reshape({tokens, 1});
    nn::linear(pass.h_TD, gate_->weight, logit_T1, {}, pass.stream);
    pass.note(product_work(pass.own_tokens(), 1, d_model_, pass.storage));
    nn::apply_sigmoid(saved.gate_T, pass.stream);
    pass.stored("shared.gate", "gate", saved.gate_T, pass.h_TD, gate_->weight);
  }
  const Arena::Mark mark = pass.arena.mark();
  saved.shared_hidden = shared_->forward(pass, {.h_TD = pass.h_TD,
                                                .prob_T = saved.gate_T,
                                                .residual_TD = a.x_TD,
                                                .out_TD = pass.wide_TD,
                                                .hidden = saved.shared_hidden});
  if (a.recompute) {
    saved.shared_hidden = {};
    pass.arena.release(mark);
  }
  return pass.wide_TD;
}

void MoeBlock::shared_backward(const Pass& pass, TensorView d_TD, const Saved& saved) const {
  ArenaScope temporaries(pass.arena);
  const int64_t tokens = d_TD.size(0);
  const bool prob = gated_ && needs_.gate_prob;
  const TensorView dprob_T = prob ? pass.arena.tensor(DType::kFloat32, {tokens}) : TensorView();
  shared_->backward(pass, {.h_TD = pass.h_TD,
                           .prob_T = saved.gate_T,
                           .hidden = saved.shared_hidden,
                           .dout_TD = d_TD,
                           .dh_TD = pass.wide_TD,
                           .dprob_T = dprob_T,
                           .needs = needs_.network});
  if (!prob) return;
  const TensorView dlogit_T1 = pass.tensor({tokens, 1});
  nn::sigmoid_gradient(saved.gate_T, dprob_T, dlogit_T1, pass.stream);
  add_weight_gradient(pass, dlogit_T1, pass.h_TD, *gate_);
  if (!needs_.input) return;
  nn::linear_input_gradient(dlogit_T1, gate_->weight, pass.wide_TD, pass.wide_TD, pass.stream);
  pass.note(product_work(pass.own_tokens(), 1, d_model_, pass.storage));
  pass.stored("shared.gate", "dh", pass.wide_TD, dlogit_T1, gate_->weight);
}

moe::MoeWeights MoeBlock::weight_shapes(const Pass& pass) const {
  const int64_t experts = group_->local_experts();
  const auto shape = [&](int64_t rows, int64_t columns) {
    return gemm::LinearWeight{
        {}, TensorView(nullptr, pass.storage, {experts, rows, columns}, group_->device())};
  };
  return weights(pass, shape(layer_.config().activation.hidden(d_ffn_), d_model_),
                 shape(d_model_, d_ffn_));
}

moe::MoeRows MoeBlock::expert_rows(const Pass& pass, const moe::MoeSaved& saved,
                                   const DelayedExperts* delayed) const {
  if (!saved.weight_TK.defined()) return {};
  const moe::MoeRows rows =
      delayed ? delayed->rows : layer_.make_rows(saved.plan.capacity, pass.arena);
  const gemm::LinearWeight w1 =
      read_weight(pass, fc1_.parameter(), gtp::Phase::kRecompute, fc1_work(pass, pairs(pass.h_TD)));
  pass.note(exchange_work(pass, layer_.dispatch_format()));
  moe::MoeWeights weights = weight_shapes(pass);
  weights.w1 = grouped(w1.values);
  weights.quantized_1.weight = w1;
  layer_.rows_again(weights, pass.h_TD, saved, rows, pass.probe, pass.arena, pass.stream,
                    pass.exchange);
  return rows;
}

// Two exchanges of a backward pass have a product each beside them if one of the gradients waits.
MoeBlock::Parts MoeBlock::at_once(bool delays) const {
  if (!delays) return {};
  return {.fc2 = layer_.overlaps(moe::Overlap::kWgrad), .fc1 = false};
}
MoeBlock::Parts MoeBlock::later() const { return {.fc2 = !at_once(true).fc2, .fc1 = true}; }

MoeBlock::ExpertGradients MoeBlock::open_gradients(const Pass& pass, Parts parts) const {
  const int64_t rows = pairs(pass.h_TD);
  ExpertGradients gradients;
  if (parts.fc2 && needs_.fc2) {
    gradients.fc2 = open_gradient(pass, fc2_.parameter(), fc2_work(pass, rows));
  }
  if (parts.fc1 && needs_.fc1) {
    gradients.fc1 = open_gradient(pass, fc1_.parameter(), fc1_work(pass, rows));
  }
  return gradients;
}

void MoeBlock::show_gradient(const Pass& pass, const optim::Parameter& p,
                             const TensorView& gradient) const {
  const ExpertRows own{{}, {}, group_->map().experts_of(group_->rank())};
  show_rows(pass.probe, pass.stream, own, p.spec.name, "gradient", gradient);
}

void MoeBlock::close_gradients(const Pass& pass, const ExpertGradients& gradients,
                               Parts parts) const {
  const auto close = [&](bool here, optim::Parameter& fc, const OpenGradient& grad) {
    if (!here || !fc.trained()) return;
    show_gradient(pass, fc, grad.view);
    close_gradient(pass, fc);
  };
  close(parts.fc2, fc2_.parameter(), gradients.fc2);
  close(parts.fc1, fc1_.parameter(), gradients.fc1);
}

DelayedExperts MoeBlock::make_delayed(const Pass& pass, const Saved& saved) const {
  const int64_t capacity = saved.experts.plan.capacity;
  DelayedExperts delayed;
  if (layer_.in_place()) {
    delayed.gradient.inner_CF = pass.tensor({capacity, d_ffn_});
    delayed.h_TD = pass.tensor({pass.own_tokens(), d_model_});
    delayed.dout_TD = pass.tensor({pass.own_tokens(), d_model_});
  } else {
    delayed.gradient = layer_.make_gradient_rows(capacity, pass.arena, false, true);
  }
  if (saved.experts.weight_TK.defined()) delayed.rows = layer_.make_rows(capacity, pass.arena);
  return delayed;
}

void MoeBlock::finish(const Pass& pass, DelayedExperts& delayed) {
  const MoeBlock* const block = std::exchange(delayed.block, nullptr);
  if (!block) return;
  if (pass.probe) pass.probe->enter(block->index_, true);
  const Parts parts = block->later();
  const ExpertGradients gradients = block->open_gradients(pass, parts);
  moe::MoeGradientRows gradient = delayed.gradient;
  std::swap(gradient.dy_CD, gradient.dx_CD);  // the two change back
  block->layer_.backward_weights({.weights = block->weight_shapes(pass),
                                  .w1 = block->target(gradients.fc1),
                                  .w2 = block->target(gradients.fc2),
                                  .rows = delayed.rows,
                                  .gradient = gradient,
                                  .h_TD = delayed.h_TD,
                                  .dout_TD = delayed.dout_TD},
                                 *delayed.saved, pass.arena, pass.stream);
  block->close_gradients(pass, gradients, parts);
}

void MoeBlock::delay(const Pass& pass, const Backward& a, const Saved& saved) const {
  a.delayed->block = this;
  a.delayed->saved = &saved.experts;
  if (layer_.in_place()) {
    copy(a.delayed->h_TD, pass.h_TD, pass.stream);
    copy(a.delayed->dout_TD, a.d_TD, pass.stream);
  } else {
    std::swap(a.delayed->gradient.dy_CD, a.delayed->gradient.dx_CD);
  }
}

void MoeBlock::backward(const Pass& pass, const Backward& a, const Saved& saved) const {
  BackwardPass p;
  begin_backward(pass, a, saved, p);
  backward_experts(pass, p);
  end_backward(pass, p);
}

void MoeBlock::begin_backward(const Pass& pass, const Backward& a, const Saved& saved,
                              BackwardPass& p) const {
  p.args = a;
  p.saved = &saved;
  p.temporaries = pass.arena.mark();
  apply_norm(pass, a.x_TD, *norm_, eps_, pass.h_TD);
  const bool has_shared = shared_ && needs_.network.any();
  const bool beside = has_shared && needs_.experts && layer_.overlaps(moe::Overlap::kShared);
  if (has_shared && !beside) shared_backward(pass, a.d_TD, saved);
  if (needs_.routed) p.dh_TD = pass.tensor({a.x_TD.size(0), d_model_});
  if (needs_.experts && a.delayed) {
    p.gradient = a.delayed->gradient;
  } else if (needs_.experts && !layer_.in_place()) {
    p.gradient = layer_.make_gradient_rows(saved.experts.plan.capacity, pass.arena, !needs_.fc2);
  }
  p.here = layer_.beside(a.delayed && !beside ? moe::Overlap::kWgrad : moe::Overlap::kShared,
                         pass.exchange, pass.stream);
  if (needs_.experts) {
    layer_.receive_gradient(saved.experts, a.d_TD, p.gradient, pass.probe, p.here.stream());
  }
  p.here.end();
  if (beside) shared_backward(pass, a.d_TD, saved);
}

void MoeBlock::backward_experts(const Pass& pass, BackwardPass& p) const {
  if (needs_.experts) pass.note(exchange_work(pass));
  // The weight gradients of the layer above are computed beside the exchange.
  if (p.args.delayed) {
    finish(pass, *p.args.delayed);
    if (pass.probe) pass.probe->enter(index_, true);
  }
  p.here.join();
  if (needs_.experts) experts_backward(pass, p);
}

void MoeBlock::end_backward(const Pass& pass, BackwardPass& p) const {
  if (needs_.experts) end_experts(pass, p);
  const Backward& a = p.args;
  if (needs_.input) norm_gradient(pass, {a.x_TD, p.dh_TD, a.d_TD, a.d_TD}, eps_, *norm_);
  pass.arena.release(p.temporaries);
}

void MoeBlock::experts_backward(const Pass& pass, BackwardPass& p) const {
  const Backward& a = p.args;
  const moe::MoeSaved& saved = p.saved->experts;
  const moe::MoeRows rows = expert_rows(pass, saved, a.delayed);
  gemm::GroupScalar bias_beta;
  const auto bias_gradient = [&](optim::Parameter* bias) {
    if (!biased_ || !bias->trained()) return TensorView();
    if (take_accumulate(*bias)) bias_beta.value = 1;
    return bias->grad;
  };
  p.b1_grad = bias_gradient(b1_);
  p.b2_grad = bias_gradient(b2_);
  p.gradients = open_gradients(pass, at_once(a.delayed));
  layer_.backward_experts(
      {.weights = read_weights(pass, gtp::Phase::kBwd, pairs(a.x_TD)),
       .grads = {.router_ED = needs_.router ? router_->grad : TensorView(),
                 .router_beta = needs_.router && take_accumulate(*router_) ? 1.0f : 0.0f,
                 .w1 = target(p.gradients.fc1),
                 .w2 = target(p.gradients.fc2),
                 .b1_LH = p.b1_grad,
                 .b2_LD = p.b2_grad,
                 .bias_beta = bias_beta},
       .h_TD = pass.h_TD,
       .dout_TD = a.d_TD,
       .addend = shared_ && needs_.input ? pass.wide_TD : TensorView(),
       .count = a.count,
       .scope = a.scope,
       .dh_TD = p.dh_TD,
       .probe = pass.probe,
       .rows = rows,
       .gradient = p.gradient,
       .exchange = pass.exchange},
      saved, p.experts, pass.arena, pass.stream);
}

void MoeBlock::end_experts(const Pass& pass, BackwardPass& p) const {
  layer_.end_backward(p.saved->experts, p.experts);
  pass.note(activation_work(pass));
  if (needs_.routed) {
    pass.note(exchange_work(pass));
    for (int product = 0; product < 2; ++product) pass.note(router_work(pass));
  }
  if (needs_.router) pass.stored(router_->spec.name, "gradient", router_->grad, pass.h_TD);
  if (p.b2_grad.defined()) show_gradient(pass, *b2_, p.b2_grad);
  if (p.b1_grad.defined()) show_gradient(pass, *b1_, p.b1_grad);
  close_gradients(pass, p.gradients, at_once(p.args.delayed));
  if (p.args.delayed && needs_.expert_weights()) delay(pass, p.args, *p.saved);
}

}  // namespace moiety::model
