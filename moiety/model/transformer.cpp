#include "moiety/model/transformer.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "moiety/base/copy.h"
#include "moiety/base/integer.h"
#include "moiety/base/trace.h"
#include "moiety/gtp/embedding.h"
#include "moiety/model/block_ops.h"
#include "moiety/model/parallel_loss.h"
#include "moiety/model/routing_sums.h"
#include "moiety/model/step_work.h"
#include "moiety/model/tensor_parallel.h"
#include "moiety/model/tp_window.h"
#include "moiety/nn/elementwise.h"
#include "moiety/nn/loss.h"
#include "moiety/nn/rope.h"

namespace moiety::model {
moe::EpLimits ep_limits(const Config& config, DType storage, int64_t tokens) {
  return moe::moe_limits(moe_config(config, storage), tokens);
}

int64_t lent_bytes(const Config& c, DType storage, int64_t capacity, bool quantized) {
  constexpr int64_t kUnit = 256;  // to which arenas round, at most
  // Where forward keeps rows they stay, elsewhere a layer gives its room to the next one.
  int64_t kept = 0;
  const Frozen frozen(c);
  for (int64_t l = 0; l < c.layers && c.recompute == Recompute::kNone; ++l) {
    kept += c.is_moe(l) && ffn_needs(c, frozen, l).fc1;
  }
  if (kept < c.moe_layers()) ++kept;
  // Rows that come once for all their slots are staged, as are quantized ones.
  const bool staged = quantized || c.row_layout == moe::RowLayout::kRank;
  const int64_t tensors = (staged ? 0 : kept) + (c.combine == moe::Reduction::kToken ? 1 : 0);
  return tensors * std::max(kUnit, round_up(byte_size(storage, capacity * c.d_model), kUnit));
}

Transformer::Transformer(const Config& config, DType storage, const ModelContext& context)
    : config_(config),
      frozen_(config),
      head_needs_(head_needs(config, frozen_)),
      storage_(storage),
      context_(context) {
  check(config_);
  MOIETY_CHECK(storage == DType::kFloat32 || storage == DType::kBFloat16,
               "model: storage {} must be float32 or bfloat16", name(storage));
  const int64_t moe_layers = config_.moe_layers();
  MOIETY_CHECK(moe_layers == 0 || context_.experts, "model: {} MoE layers need an expert group",
               moe_layers);
  MOIETY_CHECK(moe_layers == 0 || config_.aux_scope == AuxScope::kMicroBatch || context_.world,
               "model: router.aux_scope=global needs the communicator of all ranks");
  if (context_.tp && context_.tp->size() == 1) context_.tp = nullptr;
  check_device();
  if (context_.tp && context_.device.type == DeviceType::kCuda) {
    window_ = std::make_shared<TpWindow>(*context_.tp, context_.device);
  }
  // On CPU ranks an exchange then runs when its results are asked for.
  if (takes_turns()) exchange_ = Stream::deferred();
  check_tp(config_, {}, place().size);
  vocabulary_ = vocabulary_layout(config_, place());
  int64_t moe_index = 0;
  for (int64_t l = 0; l < config_.layers; ++l) {
    if (config_.is_moe(l)) {
      layers_.push_back({AttentionBlock(config_, l, place(), frozen_),
                         MoeBlock(config_, storage_, l, *context_.experts, place(), frozen_),
                         moe_index++});
    } else {
      layers_.push_back({AttentionBlock(config_, l, place(), frozen_),
                         DenseBlock(config_, l, place(), frozen_), -1});
    }
  }
}

void Transformer::check_device() const {
  const Device device = context_.device;
  MOIETY_CHECK(!context_.experts || context_.experts->device() == device,
               "model: the expert group is on {}, the model on {}",
               name(context_.experts->device()), name(device));
}

TpPlace Transformer::place() const {
  return context_.tp ? TpPlace{context_.tp->rank(), context_.tp->size()} : TpPlace{};
}

void Transformer::set_precision(const Precision& precision) {
  MOIETY_CHECK(!precision.recipe || storage_ == DType::kBFloat16,
               "model: a recipe quantizes bfloat16, storage is {}", name(storage_));
  MOIETY_CHECK(!saved_, "model: the recipe changes between forward and backward");
  check_tp(config_, precision, place().size);
  if (precision.amax_history != (scales_ ? scales_->length() : 0)) {
    scales_ = precision.amax_history > 0 ? make_scales(precision.amax_history) : nullptr;
  }
  uses_scales_ =
      scales_ && precision.recipe && precision.recipe->input.format == Format::kFp8Tensor;
  const KeptLayers& kept = precision.kept;
  for (int64_t l = 0; l < config_.layers; ++l) {
    const bool quantized = l >= kept.first && l < config_.layers - kept.last;
    LinearRecipe recipe;
    if (quantized) recipe = {precision.recipe, uses_scales_ ? scales_.get() : nullptr};
    layers_[l].attention.set_recipe(precision.attention_linears ? recipe : LinearRecipe());
    if (auto* dense = std::get_if<DenseBlock>(&layers_[l].ffn)) {
      dense->set_recipe(recipe);
    } else {
      std::get<MoeBlock>(layers_[l].ffn)
          .set_recipe(recipe, quantized ? precision.dispatch : std::nullopt);
    }
  }
  seed_ = precision.seed;
}

std::unique_ptr<DelayedScales> Transformer::make_scales(int64_t length) const {
  OwnExperts own;
  if (config_.moe_layers() > 0) {
    // The experts of a rank are consecutive.
    const moe::EpGroup& group = *context_.experts;
    const std::span<const int32_t> experts = group.map().experts_of(group.rank());
    own = {experts.empty() ? 0 : experts[0], std::ssize(experts)};
  }
  return std::make_unique<DelayedScales>(config_, length, own, context_.device);
}

void Transformer::update_scales(const TensorView& skip, const Stream& stream) {
  if (uses_scales_) scales_->update(context_.world, skip, stream);
}

std::vector<optim::ParamSpec> Transformer::parameter_specs() const {
  std::vector<optim::ParamSpec> specs{weight_spec("embed.weight", vocabulary_, config_.init_std)};
  specs[0].kind = optim::ParameterClass::kEmbedding;
  specs[0].decay = config_.decay_embeddings;
  const auto append = [&](std::vector<optim::ParamSpec> more) {
    std::move(more.begin(), more.end(), std::back_inserter(specs));
  };
  for (const Layer& layer : layers_) {
    append(layer.attention.specs());
    append(std::visit([](const auto& ffn) { return ffn.specs(); }, layer.ffn));
  }
  append({norm_spec("final_norm.weight", config_.d_model)});
  if (!config_.tie_embeddings) {
    append({weight_spec("head.weight", vocabulary_, config_.init_std)});
  }
  for (optim::ParamSpec& spec : specs) spec.frozen = frozen_(spec.name);
  return specs;
}

void Transformer::bind(std::span<optim::Parameter> parameters, gtp::Executor* executor) {
  executor_ = executor;
  ParameterCursor cursor(parameters);
  embed_ = cursor.next("embed.weight");
  for (Layer& layer : layers_) {
    layer.first = cursor.at();
    layer.attention.bind(cursor);
    layer.first_of_ffn = cursor.at();
    std::visit([&](auto& ffn) { ffn.bind(cursor); }, layer.ffn);
  }
  first_of_end_ = cursor.at();
  final_norm_ = cursor.next("final_norm.weight");
  if (!config_.tie_embeddings) head_ = cursor.next("head.weight");
  end_ = cursor.at();
  MOIETY_CHECK(cursor.at_end(), "model: {} parameters are too many", parameters.size());
  token_faults_ = moves_rows() ? Tensor(DType::kInt64, {3}) : Tensor();
  trainable_ = true;
  std::set<uint32_t> gradients;  // tensor ids of gradients, whose random numbers must differ
  for (const optim::Parameter& p : parameters) {
    MOIETY_CHECK(gradients.insert(tensor_id(p.spec.name + ".dy")).second,
                 "model: the gradient of {} has the tensor id of another one", p.spec.name);
    MOIETY_CHECK(!p.quantized.empty() || p.weight.dtype() == storage_,
                 "model: weight of {} is {}, expected {}", p.spec.name, p.weight.describe(),
                 name(storage_));
    MOIETY_CHECK(!p.weight.defined() || p.weight.device() == context_.device,
                 "model: weight of {} is {}, expected on {}", p.spec.name, p.weight.describe(),
                 name(context_.device));
    MOIETY_CHECK(p.spec.frozen == frozen_(p.spec.name), "model: {} is {}frozen by its spec",
                 p.spec.name, p.spec.frozen ? "" : "not ");
    trainable_ = trainable_ && (p.spec.frozen || p.grad.defined());
  }
}

std::vector<Transformer::State> Transformer::states() const {
  std::vector<State> states;
  for (const Layer& layer : layers_) {
    if (const auto* moe = std::get_if<MoeBlock>(&layer.ffn)) {
      states.push_back({moe->router_bias_name(), moe->router_bias()});
    }
  }
  return states;
}

const gemm::PathReport* Transformer::expert_path() const {
  for (const Layer& layer : layers_) {
    if (const auto* moe = std::get_if<MoeBlock>(&layer.ffn)) return &moe->expert_path();
  }
  return nullptr;
}

moe::RowLayout Transformer::row_layout() const {
  for (const Layer& layer : layers_) {
    if (const auto* moe = std::get_if<MoeBlock>(&layer.ffn)) return moe->row_layout();
  }
  return moe::RowLayout::kAuto;
}

void Transformer::update_router_bias(TensorView pairs_LE, float rate, Stream stream,
                                     TensorView skip) {
  check_tensor("update_router_bias", "pairs", pairs_LE, DType::kInt64,
               {config_.moe_layers(), config_.router.experts});
  int64_t l = 0;
  for (const State& bias : states()) {
    const TensorView pairs = pairs_LE.select(l++);
    if (!frozen_(bias.name)) moe::router_update_bias(bias.view, pairs, rate, stream, skip);
  }
}

int64_t Transformer::moe_capacity(double factor, int64_t tokens) const {
  if (config_.moe_layers() == 0) return 0;
  const moe::EpGroup& group = *context_.experts;
  const int topk = static_cast<int>(config_.router.top_k);
  if (factor < 0) {
    return moe::worst_capacity(group.ranks(), tokens, topk, group.local_experts(), 1);
  }
  return moe::capacity_for(factor, tokens * group.ranks(), topk, group.ranks(),
                           group.local_experts(), 1);
}

void Transformer::check_batch(const Batch& batch) const {
  MOIETY_CHECK(embed_, "model: no parameters are bound");
  check_tensor("model", "token", batch.token_BS, DType::kInt32, {-1, -1});
  const int64_t sequences = batch.token_BS.size(0), seq_len = batch.token_BS.size(1);
  MOIETY_CHECK(sequences >= 1 && seq_len >= 1, "model: token is {}", batch.token_BS.describe());
  MOIETY_CHECK(seq_len % place().size == 0,
               "model: sequences of {} tokens on {} tensor-parallel ranks, expected a multiple",
               seq_len, place().size);
  check_tensor("model", "target", batch.target_BS, DType::kInt32, {sequences, seq_len});
  if (batch.mask_BS.defined()) {
    check_tensor("model", "mask", batch.mask_BS, DType::kUInt8, {sequences, seq_len});
  }
  if (batch.routed_BS.defined()) {
    check_tensor("model", "routed", batch.routed_BS, DType::kUInt8, {sequences, seq_len});
  }
  if (batch.position_BS.defined()) {
    check_tensor("model", "position", batch.position_BS, DType::kInt32, {sequences, seq_len});
  }
}

void Transformer::grow_rope_table(int64_t positions, const Stream& stream) {
  const TensorView& table = rope_table_.view();
  if (table.defined() && table.size(0) >= positions) return;
  rope_table_ = nn::rope_table(positions, config_.head_size(), config_.rope_theta);
  if (context_.device.type == DeviceType::kCpu) return;
  const Tensor on_host = std::exchange(
      rope_table_,
      Tensor(DType::kFloat32, rope_table_.view().sizes(), context_.device, "rope table"));
  copy(rope_table_, on_host, stream);
}

Pass Transformer::begin_pass(int64_t sequences, int64_t seq_len, Arena& arena, Stream stream) {
  MOIETY_CHECK(stream.device() == context_.device && arena.device() == context_.device,
               "model: the stream is on {} and the arena on {}, expected {}", name(stream.device()),
               name(arena.device()), name(context_.device));
  grow_rope_table(seq_len, stream);
  Pass pass{.arena = arena,
            .stream = stream,
            .storage = storage_,
            .sequences = sequences,
            .seq_len = seq_len,
            .tp = context_.tp,
            .window = window_.get(),
            .executor = executor_,
            .rope_table = rope_table_,
            .position_T = {},
            .document_start_BS = {},
            .routed_T = {},
            .h_TD = {},
            .wide_TD = {},
            .probe = probe_};
  if (window_) window_->begin(byte_size(storage_, pass.tokens() * config_.d_model), stream);
  pass.h_TD = pass.tensor({pass.own_tokens(), config_.d_model});
  if (config_.shared_d_ffn > 0 && config_.moe_layers() > 0) {
    pass.wide_TD = arena.tensor(DType::kFloat32, {pass.own_tokens(), config_.d_model});
  }
  return pass;
}

Pass Transformer::begin_pass(const Batch& batch, Arena& arena, Stream stream) {
  check_batch(batch);
  const int64_t sequences = batch.token_BS.size(0), seq_len = batch.token_BS.size(1);
  Pass pass = begin_pass(sequences, seq_len, arena, stream);
  if (batch.position_BS.defined()) {
    pass.position_T = flat(batch.position_BS);
    pass.document_start_BS = arena.tensor(DType::kInt32, {sequences, seq_len});
    nn::document_starts(batch.position_BS, pass.document_start_BS, stream);
  }
  if (batch.routed_BS.defined()) {
    pass.routed_T = flat(batch.routed_BS);
    if (pass.tp) {
      const int64_t own = seq_len / pass.tp_ranks();
      const TensorView own_BS = arena.tensor(DType::kUInt8, {sequences, own});
      copy(own_BS, batch.routed_BS.slice(1, pass.tp_rank() * own, (pass.tp_rank() + 1) * own),
           stream);
      pass.routed_T = flat(own_BS);
    }
  }
  const TensorView rng = arena.tensor(DType::kUInt64, {2});
  nn::set_random_state(
      {.state_2 = rng, .seed = seed_, .draw = batch.micro_step, .draw_at = batch.micro_step_at},
      stream);
  pass.rng = static_cast<const quant::RngState*>(rng.raw());
  pass.first_token = batch.first_token;
  pass.all_tokens = batch.all_tokens;
  return pass;
}

bool Transformer::moves_rows() const {
  return embed_->bundle != gtp::kNoBundle && executor_->bundle(embed_->bundle).rows.tokens > 0;
}

void Transformer::check_tokens() {
  if (token_faults_.view().defined()) gtp::check_tokens(vocabulary_, token_faults_);
}

void Transformer::embed(const Pass& pass, const Batch& batch, TensorView x_TD) const {
  ArenaScope temporaries(pass.arena);
  const TensorView rows = pass.tp ? partial_tensor(pass, pass.tokens(), config_.d_model) : x_TD;
  TensorView table_VD;
  if (moves_rows()) {
    executor_->look_up(embed_->bundle, flat(batch.token_BS), rows, token_faults_,
                       embedding_work(pass), pass.stream);
  } else {
    table_VD = read_weight(pass, *embed_, gtp::Phase::kFwd, embedding_work(pass)).values;
    nn::embedding({.table_VD = token_rows(table_VD),
                   .token_T = flat(batch.token_BS),
                   .out_TD = rows,
                   .slice = vocabulary_slice()},
                  pass.stream);
  }
  if (pass.tp) sum_to_own(pass, rows, {}, x_TD);  // only one rank's row is not zero
  pass.stored("embedding", "x", x_TD, table_VD);
}

void Transformer::embed_gradient(const Pass& pass, const Batch& batch, TensorView d_TD) const {
  ArenaScope temporaries(pass.arena);
  const TensorView dout_TD = gather_tokens(pass, d_TD);
  if (moves_rows()) {
    executor_->add_rows(embed_->bundle, flat(batch.token_BS), dout_TD, embedding_work(pass),
                        pass.stream);
    return;
  }
  const OpenGradient grad = open_gradient(pass, *embed_, embedding_work(pass));
  const OpenGradient rows{token_rows(grad.view), grad.accumulate};
  const GradientSum sum = begin_sum(pass, rows);
  nn::embedding_backward({.dout_TD = dout_TD,
                          .token_T = flat(batch.token_BS),
                          .grad_VD = sum.view,
                          .workspace = pass.arena.tensor(DType::kInt64, {pass.tokens()}),
                          .accumulate = sum.accumulate,
                          .slice = vocabulary_slice()},
                         pass.stream);
  end_sum(pass, sum, rows);
  pass.stored(embed_->spec.name, "gradient", grad.view, d_TD);
  close_gradient(pass, *embed_);
}

void Transformer::whole_loss(const Pass& pass, const Batch& batch, const LossHead& head,
                             TensorView d_TD, TensorView loss_T) const {
  const int64_t chunk =
      nn::loss_chunk(config_.loss_chunk, pass.tokens(), config_.vocab, pass.stream.device());
  nn::LinearCrossEntropyArgs args{
      .x_TD = pass.h_TD,
      .head_VD = head.weight_VD,
      .target_T = flat(batch.target_BS),
      .mask_T = flat(batch.mask_BS),
      .loss_T = loss_T,
      .dx_TD = d_TD,
      .grad_VD = head.gradient.view,
      .workspace = pass.arena.tensor(DType::kFloat32, {chunk, config_.vocab}),
      .z_coef = config_.loss_z_coef,
      .accumulate = head.gradient.accumulate};
  nn::linear_cross_entropy(args, pass.stream);
}

void Transformer::parallel_loss(const Pass& pass, const Batch& batch, const LossHead& head,
                                TensorView d_TD, TensorView loss_T) const {
  const int64_t chunk = nn::loss_chunk(config_.loss_chunk, pass.tokens(), vocabulary_.slice_rows(),
                                       pass.stream.device()) /
                        pass.tp_ranks();
  ParallelCrossEntropyArgs args{.x_TD = pass.h_TD,
                                .head_VD = token_rows(head.weight_VD),
                                .slice = vocabulary_slice(),
                                .target_T = flat(batch.target_BS),
                                .mask_T = flat(batch.mask_BS),
                                .loss_T = loss_T,
                                .dx_TD = d_TD,
                                .grad_VD = head.gradient.view,
                                .chunk = std::max<int64_t>(1, chunk),
                                .z_coef = config_.loss_z_coef};
  args.accumulate = head.gradient.accumulate;
  parallel_cross_entropy(pass, args);
}

void Transformer::loss(const Pass& pass, const Batch& batch, TensorView x_TD, TensorView d_TD,
                       bool head_gradient, const StepSums& sums) const {
  ArenaScope temporaries(pass.arena);
  apply_norm(pass, x_TD, *final_norm_, config_.norm_eps, pass.h_TD);
  const gtp::Work product =
      product_work(pass.tokens(), vocabulary_.slice_rows(), config_.d_model, storage_);
  const TensorView loss_T = pass.arena.tensor(DType::kFloat32, {pass.tokens()});
  LossHead head;
  OpenGradient rows;
  if (head_gradient) {
    const OpenGradient grad = open_gradient(pass, head_parameter(), product);
    rows = {token_rows(grad.view), grad.accumulate};
    head.gradient = begin_sum(pass, rows);
  }
  head.weight_VD = read_weight(pass, head_parameter(), gtp::Phase::kFwd, product).values;
  if (d_TD.defined()) pass.note(product);  // the product for dx
  pass.tp ? parallel_loss(pass, batch, head, d_TD, loss_T)
          : whole_loss(pass, batch, head, d_TD, loss_T);
  pass.stored("loss", "loss", loss_T, pass.h_TD, head.weight_VD);
  if (d_TD.defined()) pass.stored("loss", "dh", d_TD, pass.h_TD, head.weight_VD);
  if (head_gradient) {
    end_sum(pass, head.gradient, rows);
    pass.stored(head_parameter().spec.name, "gradient", rows.view, pass.h_TD);
    close_gradient(pass, head_parameter());
  }
  // All ranks have the losses; one reports them.
  if (pass.tp_rank() == 0) add_losses(loss_T, sums, pass.stream);
}

}  // namespace moiety::model
