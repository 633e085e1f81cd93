// The backward pass of MoeLayer.
#include "moiety/moe/layer/experts.h"

namespace moiety::moe {

// dy has as many rows as may come, or more.
TensorView MoeLayer::rows_of(const TensorView& dy_CD, const EpPlan& plan) const {
  return dy_CD.slice(0, 0, rows_that_come(plan.capacity));
}

void MoeLayer::receive_gradient(const MoeSaved& saved, TensorView dout_TD,
                                const MoeGradientRows& gradient, TensorProbe* probe,
                                Stream stream) const {
  check_tensor("moe_layer", "dout_TD", dout_TD, config_.dtype, {saved.plan.tokens, config_.model});
  if (in_place()) return;
  if (by_maps()) make_row_map(saved.plan, gradient.source_C, stream);
  const TensorView dy = rows_of(gradient.dy_CD, saved.plan);
  combine_backward(*group_, saved.plan,
                   {.g_TD = dout_TD, .gy_CD = dy, .source_C = gradient.source_C}, stream);
  if (by_maps()) return show(probe, stream, "combine", "dy", dy, dout_TD);
  show_rows(probe, stream, expert_rows(saved), "combine", "dy", dy, dout_TD);
}

void MoeLayer::copy_rows(const EpPlan& plan, TensorView h_TD, TensorView rows_CD,
                         Stream stream) const {
  dispatch(*group_, plan, {.x_TD = h_TD, .rows_CD = rows_CD}, stream);
}

void MoeLayer::copy_gradient(const EpPlan& plan, TensorView dout_TD, TensorView rows_CD,
                             Stream stream) const {
  combine_backward(*group_, plan, {.g_TD = dout_TD, .gy_CD = rows_CD}, stream);
}

void MoeLayer::make_gradients_in_place(const Experts& experts, int64_t capacity, bool wants_w2,
                                       MoeGradientRows& gradient, Arena& arena) const {
  gradient.dx_CD = arena.tensor(config_.dtype, {capacity, config_.model});
  if (gradient.inner_CF.defined() || !wants_w2) return;
  const bool lends = arena.device().type == DeviceType::kCuda && !experts.has_recipe() &&
                     !copies_.gradient && config_.ffn <= config_.model;
  if (!lends) {
    gradient.inner_CF = arena.tensor(config_.dtype, {capacity, config_.ffn});
    return;
  }
  const TensorView& dx = gradient.dx_CD;
  const int64_t inner = byte_size(config_.dtype, capacity * config_.ffn),
                at = (dx.bytes() - inner) / 256 * 256;
  gradient.inner_CF = TensorView(static_cast<std::byte*>(dx.raw()) + at, config_.dtype,
                                 {capacity, config_.ffn}, dx.device());
}

bool MoeLayer::data_gradients(const Experts& experts, const MoeRows& rows, const EpPlan& plan,
                              TensorView h_TD, TensorView dx_CD, gemm::MlpGradients g,
                              const gemm::GradTarget& w2, Arena& arena, Stream stream) const {
  // What lies in dx's place until B4, beside a workspace: a copy of the gradient of out, or A'.
  const bool copy = in_place() && !experts.has_recipe() && copies_.gradient;
  const bool inner = g.a.defined() && g.a.raw() >= dx_CD.raw() &&
                     g.a.raw() < static_cast<std::byte*>(dx_CD.raw()) + dx_CD.bytes();
  if (!copy && !inner) {
    // Gradients of rows read the shape of x alone.
    const TensorView x = in_place() ? h_TD : rows.rows_CD.defined() ? rows.rows_CD : g.d_o;
    experts.backward_data(mlp_input(plan, rows, x), g, g.dx, arena, stream);
    return false;
  }
  const bool wanted = g.dx.defined();
  MoeRows read = rows;
  TensorView x = h_TD, free;
  if (copy) {
    read.source_C = {};
    x = dx_CD;
    copy_gradient(plan, g.d_o, dx_CD, stream);
    g.d_o = dx_CD;
  } else {
    const auto* const begin = static_cast<std::byte*>(dx_CD.raw());
    const auto* const end = static_cast<std::byte*>(g.a.raw());
    free = TensorView(dx_CD.raw(), DType::kUInt8, {end - begin}, dx_CD.device());
  }
  const gemm::MlpInput input = mlp_input(plan, read, x);
  g.dx = {};
  experts.backward_data(input, g, free, arena, stream);
  if (w2.grad.defined()) experts.backward_weights(input, g, w2, {}, arena, stream);
  if (!wanted) return true;
  g.dx = dx_CD;
  grouped_mlp_backward_input(experts.plain, input, g, stream);
  return true;
}

void MoeLayer::weight_gradients(Experts experts, const WeightGradients& args, const MoeRows& rows,
                                const EpPlan& plan, TensorView free_CD, Arena& arena,
                                Stream stream) const {
  experts.limit_sms(sms_beside_);
  gemm::MlpGradients g{.d_o = in_place() ? args.dout_TD : rows_of(args.gradient.dy_CD, plan),
                       .h = rows.hidden_CH,
                       .dh = rows.hidden_CH,
                       .a = args.gradient.inner_CF,
                       .dx = {},
                       .dprob_R = {},
                       .db1_EH = {},
                       .db2_ED = {},
                       .bias_beta = {}};
  if (!in_place()) {
    // Without the gradient of w1, or with columns, only the shape of x is read.
    const TensorView x = rows.rows_CD.defined() ? rows.rows_CD : g.d_o;
    experts.quantized.fc1.columns = rows.columns;
    return experts.backward_weights(mlp_input(plan, rows, x), g, args.w2, args.w1, arena, stream);
  }
  ArenaScope temporaries(arena);
  const RowCopies copies = experts.has_recipe() ? RowCopies{} : copies_;
  const bool any = (args.w2.grad.defined() && copies.gradient) ||
                   (args.w1.grad.defined() && copies.weight_gradient);
  if (any && !free_CD.defined()) {
    free_CD = arena.tensor(config_.dtype, {plan.capacity, config_.model});
  }
  MoeRows ordered = rows;
  ordered.source_C = {};
  if (args.w2.grad.defined()) {
    gemm::MlpInput input = mlp_input(plan, rows, args.h_TD);
    if (copies.gradient) {
      copy_gradient(plan, args.dout_TD, free_CD, stream);
      g.d_o = free_CD;
      input = mlp_input(plan, ordered, free_CD);
    }
    experts.backward_weights(input, g, args.w2, {}, arena, stream);
  }
  if (!args.w1.grad.defined()) return;
  const Came came = send_nowhere(args.h_TD, arena, stream);
  gemm::MlpInput input = mlp_input(plan, rows, came.x);
  if (copies.weight_gradient) {
    copy_rows(plan, came.x, free_CD, stream);
    input = mlp_input(plan, ordered, free_CD);
  }
  experts.backward_weights(input, g, {}, args.w1, arena, stream);
}

void MoeLayer::backward_weights(const WeightGradients& args, const MoeSaved& saved, Arena& arena,
                                Stream stream) const {
  const MoeRows& rows = args.rows.hidden_CH.defined() ? args.rows : saved.rows;
  weight_gradients(experts(args.weights), args, rows, saved.plan, {}, arena, stream);
}

void MoeLayer::backward(const MoeBackwardArgs& args, const MoeSaved& saved, Arena& arena,
                        Stream stream) const {
  MoeBackwardPass pass;
  backward_experts(args, saved, pass, arena, std::move(stream));
  end_backward(saved, pass);
}

void MoeLayer::backward_experts(const MoeBackwardArgs& args, const MoeSaved& saved,
                                MoeBackwardPass& pass, Arena& arena, Stream stream) const {
  const int64_t tokens = saved.plan.tokens, capacity = saved.plan.capacity;
  check_tensor("moe_layer", "h_TD", args.h_TD, config_.dtype, {tokens, config_.model});
  const bool routed = args.dh_TD.defined();
  if (routed) {
    check_tensor("moe_layer", "dh_TD", args.dh_TD, config_.dtype, {tokens, config_.model});
  }
  pass.args = args;
  pass.arena = &arena;
  pass.stream = stream;
  pass.temporaries = arena.mark();
  const Experts experts = this->experts(args.weights);
  const MoeRows& rows = args.rows.hidden_CH.defined() ? args.rows : saved.rows;
  MOIETY_CHECK(rows.hidden_CH.defined(), "moe_layer: backward without the rows of rows_again");
  MoeGradientRows gradient = args.gradient;
  if (!gradient.dx_CD.defined() && in_place()) {
    make_gradients_in_place(experts, capacity, args.grads.w2.grad.defined(), gradient, arena);
    check_tensor("moe_layer", "dout_TD", args.dout_TD, config_.dtype, {tokens, config_.model});
  } else if (!gradient.dx_CD.defined()) {
    gradient = make_gradient_rows(capacity, arena);
    receive_gradient(saved, args.dout_TD, gradient, args.probe, stream);
  }
  const gemm::MlpGradients gradients{
      .d_o = in_place() ? args.dout_TD : rows_of(gradient.dy_CD, saved.plan),
      .h = rows.hidden_CH,
      .dh = rows.hidden_CH,
      .a = gradient.inner_CF,
      .dx = routed ? gradient.dx_CD : TensorView(),
      .dprob_R = routed ? arena.tensor(DType::kFloat32, {capacity}) : TensorView(),
      .db1_EH = args.grads.b1_LH,
      .db2_ED = args.grads.b2_LD,
      .bias_beta = args.grads.bias_beta};
  const ExpertRows alive = expert_rows(saved);
  const bool has_w2 = data_gradients(experts, rows, saved.plan, args.h_TD, gradient.dx_CD,
                                     gradients, args.grads.w2, arena, stream);
  const WeightGradients targets{.w1 = args.grads.w1,
                                .w2 = has_w2 ? gemm::GradTarget{} : args.grads.w2,
                                .gradient = gradient,
                                .h_TD = args.h_TD,
                                .dout_TD = args.dout_TD};
  show_rows(args.probe, stream, alive, "experts.fc2", "dhidden", gradients.dh, gradients.d_o);
  if (routed) {
    show_rows(args.probe, stream, alive, "experts.fc1", "drows", gradients.dx, gradients.dh);
    if (!end_in_place(saved, gradients, pass)) send_home(saved, gradients, pass);
  }
  weight_gradients(experts, targets, rows, saved.plan, gradient.dx_CD, arena, stream);
}

void MoeLayer::send_home(const MoeSaved& saved, const gemm::MlpGradients& gradients,
                         MoeBackwardPass& pass) const {
  const MoeBackwardArgs& args = pass.args;
  const int64_t tokens = saved.plan.tokens;
  Arena& arena = *pass.arena;
  // The part of dh through the experts stays float32 until the router's part is added.
  pass.gx_TD = config_.dtype == DType::kFloat32
                   ? args.dh_TD
                   : arena.tensor(DType::kFloat32, {tokens, config_.model});
  pass.dweight_TK = arena.tensor(DType::kFloat32, {tokens, config_.router.top_k});
  pass.home = beside(Overlap::kWgrad, args.exchange, pass.stream);
  dispatch_backward(*group_, saved.plan,
                    {.g_rows_CD = gradients.dx,
                     .g_slot_w = gradients.dprob_R,
                     .addend = args.addend,
                     .reduction = config_.reduction,
                     .gx_TD = pass.gx_TD,
                     .gw_TK = pass.dweight_TK},
                    pass.home.stream());
  show(args.probe, pass.home.stream(), "dispatch", "dh", pass.gx_TD, gradients.dx);
  pass.home.end();
}

RouterBackwardArgs MoeLayer::router_gradients(const MoeSaved& saved,
                                              const MoeBackwardArgs& args) const {
  return {.h_TD = args.h_TD,
          .w_ED = args.weights.router_ED,
          .logits_TE = saved.logits_TE,
          .idx_TK = saved.idx_TK,
          .dweight_TK = {},
          .count = args.count,
          .scope = args.scope,
          .dw_ED = args.grads.router_ED,
          .dw_beta = args.grads.router_beta,
          .addend_TD = {},
          .dh_TD = args.dh_TD,
          .workspace = {}};
}

void MoeLayer::router_backward(RouterBackwardArgs args, Arena& arena, const Stream& stream) const {
  const RouterConfig& router = config_.router;
  args.workspace =
      Experts::memory(arena, router_backward_workspace(router, config_.dtype, args.h_TD.size(0),
                                                       config_.model, stream.device().type));
  moe::router_backward(router, args, stream);
}

bool MoeLayer::end_in_place(const MoeSaved& saved, const gemm::MlpGradients& gradients,
                            MoeBackwardPass& pass) const {
  const MoeBackwardArgs& args = pass.args;
  if (!in_place() || args.probe || args.addend.defined()) return false;
  if (config_.reduction != Reduction::kRank) return false;
  RouterBackwardArgs router = router_gradients(saved, args);
  router.slots = {
      .rows_CD = gradients.dx, .dweight_C = gradients.dprob_R, .slot_TK = saved.plan.slot_TK};
  if (!router_sums_slots(router, pass.stream)) return false;
  ArenaScope temporaries(*pass.arena);
  router_backward(router, *pass.arena, pass.stream);
  pass.ended = true;
  return true;
}

void MoeLayer::end_backward(const MoeSaved& saved, MoeBackwardPass& pass) const {
  const MoeBackwardArgs& args = pass.args;
  if (args.dh_TD.defined() && !pass.ended) {
    pass.home.join();
    RouterBackwardArgs router = router_gradients(saved, args);
    router.dweight_TK = pass.dweight_TK;
    router.addend_TD = pass.gx_TD;
    router_backward(router, *pass.arena, pass.stream);
    show(args.probe, pass.stream, "router", "dh", args.dh_TD, pass.dweight_TK, pass.gx_TD);
  }
  pass.arena->release(pass.temporaries);
}

}  // namespace moiety::moe
