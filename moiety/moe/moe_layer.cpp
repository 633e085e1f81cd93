#include "moiety/moe/moe_layer.h"

#include <optional>

#include "moiety/base/copy.h"
#include "moiety/base/error.h"
#include "moiety/moe/gpu_exchange.h"
#include "moiety/moe/layer/experts.h"
#include "moiety/moe/prepare_dispatch.h"
#include "moiety/quant/dequantize.h"
#include "moiety/quant/quantize.h"

namespace moiety::moe {
namespace {

constexpr int64_t kInfoWords = 16;

}  // namespace

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
  copies_ = config.copies.value_or(choose_row_copies(path_.path, config.model, config.ffn,
                                                     config.activation.hidden(config.ffn)));
}

int64_t MoeLayer::capacity_for(double factor, int64_t group_tokens) const {
  return moe::capacity_for(factor, group_tokens, static_cast<int>(config_.router.top_k),
                           group_->ranks(), group_->local_experts(), config_.alignment);
}

MoeLayer::Experts MoeLayer::experts(const MoeWeights& weights, const QuantizedView& codes) const {
  Experts experts{.plain = {.path = path_.path,
                            .fused = path_.fused,
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
      Experts::memory(arena, plan_bytes(group_->map(), group_->limits(), prepare_args));
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
                  .workspace = Experts::memory(
                      arena, router_forward_workspace(router, tokens, args.stats.count.size(0))),
                  .later = in_place() ? &prepare_args.statistics : nullptr},
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

}  // namespace moiety::moe
