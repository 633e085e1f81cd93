#include "moiety/moe/moe_layer.h"

#include <optional>

#include "moiety/base/copy.h"
#include "moiety/base/error.h"
#include "moiety/moe/gpu_exchange.h"
#include "moiety/moe/prepare_dispatch.h"
#include "moiety/quant/dequantize.h"
#include "moiety/quant/quantize.h"

namespace moiety::moe {
namespace {

constexpr int64_t kInfoWords = 16;

TensorView bytes(Arena& arena, int64_t n) { return arena.tensor(DType::kUInt8, {n}); }

}  // namespace

struct MoeLayer::Experts {
  gemm::GroupedMlp plain;
  gemm::QuantizedMlp quantized;  // in use if it has a recipe
  bool has_recipe() const { return quantized.fc1.recipe; }
  void limit_sms(int limit) {
    plain.sm_limit = quantized.fc1.sm_limit = quantized.fc2.sm_limit = limit;
  }

  void forward(const gemm::MlpInput& input, TensorView h, TensorView y, Arena& arena,
               Stream stream) const {
    if (has_recipe()) return quantized_mlp_forward(quantized, input, h, y, arena, stream);
    grouped_mlp_forward(plain, input, h, y, bytes(arena, grouped_mlp_workspace(plain, input)),
                        stream);
  }
  void hidden(const gemm::MlpInput& input, TensorView h, Arena& arena, Stream stream) const {
    if (has_recipe()) return quantized_mlp_hidden(quantized, input, h, arena, stream);
    grouped_mlp_hidden(plain, input, h, stream);
  }
  // `free`: memory that is not in use until dx is written, optional.
  void backward_data(const gemm::MlpInput& input, const gemm::MlpGradients& gradients,
                     TensorView free, Arena& arena, Stream stream) const {
    if (has_recipe()) {
      return quantized_mlp_backward_data(quantized, input, gradients, arena, stream);
    }
    // A GPU has read what B1 leaves when it writes dx over it.
    const int64_t need = grouped_mlp_workspace(plain, input);
    const bool fits = stream.device().type == DeviceType::kCuda && free.defined() &&
                      free.contiguous() && free.bytes() >= need;
    grouped_mlp_backward_data(
        plain, input, gradients,
        fits ? TensorView(free.raw(), DType::kUInt8, {need}, free.device()) : bytes(arena, need),
        stream);
  }
  void backward_weights(const gemm::MlpInput& input, const gemm::MlpGradients& gradients,
                        const gemm::GradTarget& w2, const gemm::GradTarget& w1, Arena& arena,
                        Stream stream) const {
    if (has_recipe()) {
      return quantized_mlp_backward_weights(quantized, input, gradients, w2, w1, arena, stream);
    }
    grouped_mlp_backward_weights(plain, input, gradients, w2, w1, stream);
  }
};

Beside::Beside(bool apart, const Stream& side, const Stream& main, EpGroup& group)
    : apart_(apart), group_(&group), side_(apart ? side : main), main_(main) {
  if (!apart_) return;
  Event here;
  here.record(main_);
  side_.wait(here);
  begin_beside(*group_, side_);
}

void Beside::end() {
  if (apart_) end_.record(side_);
}

void Beside::join() const {
  if (!apart_) return;
  end_beside(*group_, main_);
  main_.wait(end_);
}

MoeStats moe_stats(const TensorView& info) {
  check_tensor("moe_stats", "info", info, DType::kInt64, {kInfoWords});
  const int64_t* word = info.data<int64_t>();
  return {.required = word[kInfoGroupRequired],
          .capacity = word[kInfoCapacity],
          .dropped = word[kInfoGroupDropped],
          .overflow = word[kInfoGroupOverflow] != 0};
}

EpLimits moe_limits(const MoeConfig& config, int64_t tokens_max) {
  return {.tokens = tokens_max,
          .model = config.model,
          .topk = static_cast<int>(config.router.top_k),
          .widest = config.dtype == DType::kFloat32 ? PayloadFormat::kFP32 : PayloadFormat::kBF16,
          .rank_fp32 = config.reduction == Reduction::kRankFp32,
          .token_order = config.reduction == Reduction::kToken};
}

MoeLayer::MoeLayer(const MoeConfig& config, EpGroup& group) : config_(config), group_(&group) {
  check(config.router);
  MOIETY_CHECK(config.dtype == DType::kFloat32 || config.dtype == DType::kBFloat16,
               "moe_layer: dtype {} must be float32 or bfloat16", name(config.dtype));
  MOIETY_CHECK(config.alignment >= 1, "moe_layer: alignment={} must be positive", config.alignment);
  MOIETY_CHECK(group.map().experts() == config.router.experts,
               "moe_layer: group \"{}\" has {} experts, the router {}", group.name(),
               group.map().experts(), config.router.experts);
  if (config.overlap == Overlap::kAuto) {
    const bool gpu = group.device().type == DeviceType::kCuda;
    config_.overlap = gpu ? Overlap::kWgrad : Overlap::kNone;
  }
  const bool beside = config_.overlap == Overlap::kWgrad || config_.overlap == Overlap::kShared;
  if (beside && group.ranks() > 1) side_ = side_stream(group);
  if (overlaps(Overlap::kWgrad)) sms_beside_ = sms_beside(group);
  layout_ = choose_row_layout(config.layout, group.ranks());
  path_ = gemm::choose_grouped_mlp({.dtype = config.dtype,
                                    .model = config.model,
                                    .ffn = config.ffn,
                                    .interleave = config.interleave},
                                   group.device());
  if (config.path) path_.require(*config.path);
  if (!in_place()) return;
  copies_ = config.copies.value_or(
      choose_row_copies(path_.path, config.ffn, config.activation.hidden(config.ffn)));
}

int64_t MoeLayer::capacity_for(double factor, int64_t group_tokens) const {
  return moe::capacity_for(factor, group_tokens, static_cast<int>(config_.router.top_k),
                           group_->ranks(), group_->local_experts(), config_.alignment);
}

MoeLayer::Experts MoeLayer::experts(const MoeWeights& weights, const QuantizedView& codes) const {
  Experts experts{.plain = {.path = path_.path,
                            .activation = config_.activation,
                            .interleave = config_.interleave,
                            .w1 = weights.w1,
                            .w2 = weights.w2,
                            .b1_EH = weights.b1_LH,
                            .b2_ED = weights.b2_LD},
                  .quantized = {.activation = config_.activation,
                                .interleave = config_.interleave,
                                .fc1 = weights.quantized_1,
                                .fc2 = weights.quantized_2,
                                .b1_EH = weights.b1_LH,
                                .b2_ED = weights.b2_LD}};
  gemm::QuantizedLinear& fc1 = experts.quantized.fc1;
  if (fc1.recipe && fc1.recipe->input == codes.spec) fc1.rows = codes;
  return experts;
}

int64_t MoeLayer::rows_that_come(int64_t capacity) const {
  return by_maps() ? mapped_rows(group_->ranks(), group_->limits().tokens, capacity) : capacity;
}

TensorView MoeLayer::make_copies(int64_t capacity, Arena& arena) const {
  if (in_place()) return {};
  // Rows that travel quantized come as codes, and these are dequantized. Those that come once for
  // all their slots are staged.
  const int64_t rows = rows_that_come(capacity);
  return dispatch_ || by_maps() ? arena.tensor(config_.dtype, {rows, config_.model})
                                : arena.lent_tensor(config_.dtype, {rows, config_.model});
}

MoeRows MoeLayer::make_rows(int64_t capacity, Arena& arena, bool copies) const {
  MoeRows rows;
  if (copies) rows.rows_CD = make_copies(capacity, arena);
  if (by_maps()) rows.source_C = arena.tensor(DType::kInt32, {capacity});
  rows.slot_w = arena.tensor(DType::kFloat32, {capacity});
  rows.hidden_CH = arena.tensor(config_.dtype, {capacity, config_.activation.hidden(config_.ffn)});
  return rows;
}

bool MoeLayer::leaves_columns(int64_t capacity) const {
  // Rows that peers store are where they reach them.
  const bool lent = group_->zero_copy() != ZeroCopy::kOff && !dispatch_ && !by_maps();
  return kept_ && !in_place() && !lent &&
         keeps_columns(*kept_, capacity, config_.model, group_->local_experts(),
                       rows_that_come(capacity));
}

MoeRows MoeLayer::make_kept_rows(int64_t capacity, Arena& arena, bool frozen_w1) const {
  const bool columns = !frozen_w1 && leaves_columns(capacity);
  MoeRows rows = make_rows(capacity, arena, !frozen_w1 && !columns);
  if (columns) {
    rows.columns =
        gemm::allocate_columns(*kept_, capacity, config_.model, group_->local_experts(), arena);
  }
  return rows;
}

MoeGradientRows MoeLayer::make_gradient_rows(int64_t capacity, Arena& arena, bool frozen_w2,
                                             bool swaps) const {
  MoeGradientRows gradient;
  if (!in_place()) {
    const int64_t rows = swaps ? capacity : rows_that_come(capacity);
    gradient.dy_CD = arena.tensor(config_.dtype, {rows, config_.model});
    if (by_maps()) gradient.source_C = arena.tensor(DType::kInt32, {capacity});
  }
  if (!frozen_w2) gradient.inner_CF = arena.tensor(config_.dtype, {capacity, config_.ffn});
  gradient.dx_CD = arena.tensor(config_.dtype, {capacity, config_.model});
  return gradient;
}

gemm::MlpInput MoeLayer::mlp_input(const EpPlan& plan, const MoeRows& rows, TensorView x) const {
  return {.groups = {.count_E = plan.rows_real,
                     .begin_E1 = plan.offset,
                     .status = {},
                     .experts = group_->local_experts(),
                     .capacity = plan.capacity,
                     .expected_rows = 0},
          .x = x,
          .prob_R = rows.slot_w,
          .source_R = rows.source_C,
          .row_TK = {}};
}

bool MoeLayer::copies_forward(const Experts& experts) const {
  return in_place() && copies_.forward && !experts.has_recipe();
}

gemm::MlpInput MoeLayer::forward_input(const Experts& experts, const EpPlan& plan,
                                       const MoeRows& rows, const Came& came, TensorView copy_CD,
                                       Stream stream) const {
  gemm::MlpInput input = mlp_input(plan, rows, came.x);
  if (!copies_forward(experts)) return input;
  copy_rows(plan, came.x, copy_CD, stream);
  input.x = copy_CD;
  input.source_R = {};
  return input;
}

void MoeLayer::set_dispatch(const std::optional<QuantSpec>& format) {
  MOIETY_CHECK(!format || config_.dtype == DType::kBFloat16,
               "moe_layer: rows that travel quantized are bfloat16, the layer is {}",
               name(config_.dtype));
  MOIETY_CHECK(
      !format || format->format == Format::kFp8Block1x128 || format->format == Format::kMxfp8,
      "moe_layer: rows cannot travel as {}, expected blocks of FP8 or MXFP8", name(format->format));
  dispatch_ = format;
}

MoeLayer::Came MoeLayer::send_nowhere(TensorView h_TD, Arena& arena, Stream stream) const {
  if (!dispatch_) return {h_TD, {}};
  const int64_t tokens = h_TD.size(0);
  Came came{arena.tensor(config_.dtype, {tokens, config_.model}),
            gemm::allocate_rows(*dispatch_, tokens, config_.model, arena)};
  quant::quantize(h_TD, came.codes, {}, stream);
  quant::dequantize(came.codes, Direction::kRow, came.x, {}, stream);
  return came;
}

MoeLayer::Came MoeLayer::send(const Move& move, TensorView h_TD, TensorView weight_TK,
                              const MoeRows& rows, Arena& arena, const Beside& exchange) const {
  const Stream& stream = exchange.stream();
  DispatchArgs args{
      .x_TD = h_TD, .w_TK = weight_TK, .rows_CD = rows.rows_CD, .slot_w = rows.slot_w};
  args.source_C = rows.source_C;
  QuantizedView received;
  if (dispatch_) {
    received = gemm::allocate_rows(*dispatch_, rows.rows_CD.size(0), config_.model, arena);
    // Beside other work, what is sent stays where it is until the caller's scope ends.
    std::optional<ArenaScope> temporaries;
    if (!exchange.apart()) temporaries.emplace(arena);
    const QuantizedView sent = gemm::allocate_rows(*dispatch_, h_TD.size(0), config_.model, arena);
    quant::quantize(h_TD, sent, {}, stream);
    args.x_TD = sent;
    args.rows_CD = received;
    args.zero_tail = true;  // the tail is dequantized with the rest
    move(args);
    quant::dequantize(received, Direction::kRow, rows.rows_CD, {}, stream);
  } else {
    move(args);
  }
  return {rows.rows_CD, received};
}

MoeLayer::Came MoeLayer::first_exchange(const PrepareArgs& routing, TensorView plan_memory,
                                        TensorView h_TD, TensorView weight_TK, const MoeRows& rows,
                                        EpPlan& plan, Arena& arena, const Beside& exchange) const {
  const Stream& stream = exchange.stream();
  if (in_place()) {
    PrepareArgs with_maps = routing;
    with_maps.w_TK = weight_TK;
    with_maps.maps = {rows.source_C, rows.slot_w};
    plan = prepare(*group_, with_maps, plan_memory, stream);
    return send_nowhere(h_TD, arena, stream);
  }
  const Move move = [&](const DispatchArgs& a) {
    if (by_maps()) {
      plan = prepare(*group_, routing, plan_memory, stream);
      make_row_map(plan, rows.source_C, stream);
      return dispatch(*group_, plan, a, stream);
    }
    plan = plan_and_send(routing, a, plan_memory, stream);
  };
  return send(move, h_TD, weight_TK, rows, arena, exchange);
}

void MoeLayer::show_rows_that_came(TensorProbe* probe, Stream stream, const MoeSaved& saved,
                                   const Came& came, TensorView h_TD) const {
  if (!by_maps()) {
    show_rows(probe, stream, expert_rows(saved), "dispatch", "rows", came.x, h_TD);
  } else if (dispatch_ || !in_place()) {
    show(probe, stream, "dispatch", "rows", came.x, h_TD);
  }
}

void MoeLayer::rows_again(const MoeWeights& weights, TensorView h_TD, const MoeSaved& saved,
                          const MoeRows& rows, TensorProbe* probe, Arena& arena, Stream stream,
                          const std::optional<Stream>& exchange) const {
  MOIETY_CHECK(saved.weight_TK.defined(), "moe_layer: the rows of forward were kept");
  ArenaScope temporaries(arena);
  Came came;
  if (in_place()) {
    make_slot_maps(saved.plan, saved.weight_TK, {rows.source_C, rows.slot_w}, stream);
    came = send_nowhere(h_TD, arena, stream);
  } else {
    Beside there = beside(Overlap::kNone, exchange, stream);
    const Move again = [&](const DispatchArgs& a) {
      if (by_maps()) make_row_map(saved.plan, rows.source_C, there.stream());
      dispatch(*group_, saved.plan, a, there.stream());
    };
    came = send(again, h_TD, saved.weight_TK, rows, arena, there);
    there.end();
    there.join();
  }
  show_rows_that_came(probe, stream, saved, came, h_TD);
  const Experts experts = this->experts(weights, came.codes);
  const TensorView copy_CD = copies_forward(experts)
                                 ? arena.tensor(config_.dtype, {saved.plan.capacity, config_.model})
                                 : TensorView();
  experts.hidden(forward_input(experts, saved.plan, rows, came, copy_CD, stream), rows.hidden_CH,
                 arena, stream);
  show_rows(probe, stream, expert_rows(saved), "experts.fc1", "hidden", rows.hidden_CH, came.x);
}

// Few tokens go before the counts of the peers have come, unless peers store into their slots.
EpPlan MoeLayer::plan_and_send(const PrepareArgs& routing, const DispatchArgs& rows,
                               TensorView plan_memory, Stream stream) const {
  const EpLimits& limits = group_->limits();
  if (limits.tokens <= kFewTokens && limits.depth > 1 && group_->zero_copy() == ZeroCopy::kOff) {
    return prepare_dispatch(*group_, routing, rows, plan_memory, stream);
  }
  const EpPlan plan = prepare(*group_, routing, plan_memory, stream);
  dispatch(*group_, plan, rows, stream);
  return plan;
}

TensorView MoeLayer::make_outputs(int64_t capacity, Arena& arena) const {
  const bool by_token = config_.reduction == Reduction::kToken;
  return by_token ? arena.lent_tensor(config_.dtype, {capacity, config_.model})
                  : arena.tensor(config_.dtype, {capacity, config_.model});
}

ExpertRows MoeLayer::expert_rows(const MoeSaved& saved) const {
  return {saved.plan.offset, saved.plan.rows_real, group_->map().experts_of(group_->rank())};
}

void MoeLayer::forward(const MoeForwardArgs& args, MoeSaved* saved, Arena& arena,
                       Stream stream) const {
  MoeForwardPass pass;
  begin_forward(args, pass, arena, std::move(stream));
  forward_experts(args.weights, pass);
  end_forward(pass, saved);
}

void MoeLayer::begin_forward(const MoeForwardArgs& args, MoeForwardPass& pass, Arena& arena,
                             Stream stream) const {
  const RouterConfig& router = config_.router;
  check_tensor("moe_layer", "h_TD", args.h_TD, config_.dtype, {-1, config_.model});
  if (args.info.defined()) {
    check_tensor("moe_layer", "info", args.info, DType::kInt64, {kInfoWords});
  }
  const int64_t tokens = args.h_TD.size(0);
  pass.args = args;
  pass.arena = &arena;
  pass.stream = stream;
  pass.all = arena.mark();
  PrepareArgs prepare_args{.idx_TK = arena.tensor(DType::kInt32, {tokens, router.top_k}),
                           .alignment = config_.alignment,
                           .capacity = args.capacity,
                           .capacity_limit = {},
                           .overflow = config_.overflow};
  const TensorView plan_memory =
      bytes(arena, plan_bytes(group_->map(), group_->limits(), prepare_args));
  MoeSaved& s = pass.saved;
  s = {.plan = {},
       .logits_TE = arena.tensor(DType::kFloat32, {tokens, router.experts}),
       .idx_TK = prepare_args.idx_TK,
       .weight_TK = {},
       .rows = {}};
  const auto make_weights = [&] { return arena.tensor(DType::kFloat32, {tokens, router.top_k}); };
  if (args.recompute) s.weight_TK = make_weights();
  if (!args.recompute) s.rows = make_kept_rows(args.capacity, arena, args.frozen_w1);
  pass.temporaries = arena.mark();
  const TensorView weight_TK = args.recompute ? s.weight_TK : make_weights();
  MoeRows& rows = pass.rows;
  rows = args.recompute ? make_rows(args.capacity, arena) : s.rows;
  if (!rows.rows_CD.defined()) rows.rows_CD = make_copies(args.capacity, arena);
  router_forward(router,
                 {.h_TD = args.h_TD,
                  .w_ED = args.weights.router_ED,
                  .bias_E = args.weights.router_bias_E,
                  .mask_T = args.mask_T,
                  .logits_TE = s.logits_TE,
                  .idx_TK = s.idx_TK,
                  .weight_TK = weight_TK,
                  .stats = args.stats,
                  .workspace = bytes(
                      arena, router_forward_workspace(router, tokens, args.stats.count.size(0)))},
                 stream);
  show(args.probe, stream, "router", "logits", s.logits_TE, args.h_TD, args.weights.router_ED);
  show(args.probe, stream, "router", "weights", weight_TK, s.logits_TE);
  pass.there = beside(Overlap::kShared, args.exchange, stream);
  pass.came = first_exchange(prepare_args, plan_memory, args.h_TD, weight_TK, rows, s.plan, arena,
                             pass.there);
  pass.there.end();
}

void MoeLayer::forward_experts(const MoeWeights& weights, MoeForwardPass& pass) const {
  const MoeForwardArgs& args = pass.args;
  const MoeSaved& s = pass.saved;
  const MoeRows& rows = pass.rows;
  const Stream& stream = pass.stream;
  Arena& arena = *pass.arena;
  pass.there.join();
  if (args.info.defined()) copy(args.info, s.plan.info, stream);
  show_rows_that_came(args.probe, stream, s, pass.came, args.h_TD);
  const ExpertRows alive = expert_rows(s);
  const TensorView y_CD = make_outputs(args.capacity, arena);
  const Experts experts = this->experts(weights, pass.came.codes);
  pass.fc1 = experts.quantized.fc1;
  pass.fc1.weight = {};
  // A copy may lie where y will: FC1 has read it when FC2 writes y.
  experts.forward(forward_input(experts, s.plan, rows, pass.came, y_CD, stream), rows.hidden_CH,
                  y_CD, arena, stream);
  show_rows(args.probe, stream, alive, "experts.fc1", "hidden", rows.hidden_CH, pass.came.x);
  show_rows(args.probe, stream, alive, "experts.fc2", "y", y_CD, rows.hidden_CH, rows.slot_w);
  pass.home = beside(Overlap::kNone, args.exchange, stream);
  combine(*group_, s.plan,
          {.y_CD = y_CD,
           .slot_w = {},
           .addend = args.addend,
           .reduction = config_.reduction,
           .out_TD = args.out_TD},
          pass.home.stream());
  pass.home.end();
}

void MoeLayer::end_forward(MoeForwardPass& pass, MoeSaved* saved) const {
  pass.home.join();
  if (saved && pass.saved.rows.columns.col_data.defined()) {
    const gemm::MlpInput rows = mlp_input(pass.saved.plan, pass.rows, pass.came.x);
    make_columns(pass.fc1, rows.groups, {rows.x, rows.source_R}, pass.saved.rows.columns,
                 *pass.arena, pass.stream);
  }
  show(pass.args.probe, pass.stream, "combine", "x", pass.args.out_TD, pass.args.addend);
  pass.arena->release(saved ? pass.temporaries : pass.all);
  if (saved) *saved = pass.saved;
}

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
  args.workspace = bytes(arena, router_backward_workspace(router, config_.dtype, args.h_TD.size(0),
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
