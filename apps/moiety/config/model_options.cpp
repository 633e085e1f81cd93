#include "apps/moiety/config/model_options.h"

#include <algorithm>
#include <optional>

#include "apps/moiety/config/names.h"
#include "moiety/base/number_text.h"

namespace moiety::app {
namespace {

constexpr Names<moe::Score, 2> kScores{
    {{"softmax", moe::Score::kSoftmax}, {"sigmoid", moe::Score::kSigmoid}}};
constexpr Names<moe::AuxLoss, 4> kAuxLosses{{{"none", moe::AuxLoss::kNone},
                                             {"switch", moe::AuxLoss::kSwitch},
                                             {"hf", moe::AuxLoss::kHf},
                                             {"sequence", moe::AuxLoss::kSequence}}};
constexpr Names<model::AuxScope, 2> kScopes{
    {{"micro_batch", model::AuxScope::kMicroBatch}, {"global", model::AuxScope::kGlobal}}};
constexpr Names<moe::Overlap, 5> kOverlaps{{{"auto", moe::Overlap::kAuto},
                                            {"none", moe::Overlap::kNone},
                                            {"wgrad", moe::Overlap::kWgrad},
                                            {"shared", moe::Overlap::kShared},
                                            {"micro_batch", moe::Overlap::kMicroBatch}}};
constexpr Names<moe::Reduction, 3> kReductions{{{"rank", moe::Reduction::kRank},
                                                {"rank_fp32", moe::Reduction::kRankFp32},
                                                {"token", moe::Reduction::kToken}}};
constexpr Names<moe::RowLayout, 3> kLayouts{{{"auto", moe::RowLayout::kAuto},
                                             {"expert", moe::RowLayout::kExpert},
                                             {"rank", moe::RowLayout::kRank}}};
// Norms' outputs and activations are never kept.
constexpr Names<model::Recompute, 4> kRecomputes{{{"none", model::Recompute::kNone},
                                                  {"norm", model::Recompute::kNone},
                                                  {"moe", model::Recompute::kMoe},
                                                  {"full", model::Recompute::kFull}}};

constexpr Names<std::optional<gemm::MlpPath>, 6> kPaths{
    {{"auto", std::nullopt},
     {"reference", gemm::MlpPath::kReference},
     {"cpu", gemm::MlpPath::kCpu},
     {"cuda_plain", gemm::MlpPath::kCudaPlain},
     {"sm90", gemm::MlpPath::kSm90},
     {"sm90_fused", gemm::MlpPath::kSm90Fused}}};

// The kinds of moe.activation, and the parameters that each one takes: no more and no fewer.
struct ActivationChoice {
  std::string_view name;
  gemm::Activation activation;  // with 0 for what the configuration gives
  bool alpha = false, limit = false, offset = false;
};
constexpr ActivationChoice kActivations[] = {
    {.name = "swiglu", .activation = gemm::swiglu()},
    {.name = "clamped_swiglu", .activation = gemm::clamped_swiglu(0), .limit = true},
    {.name = "qgeglu",
     .activation = gemm::qgeglu(0, 0, 0),
     .alpha = true,
     .limit = true,
     .offset = true},
    {.name = "relu2", .activation = gemm::squared_relu()}};

// Takes a parameter's value from its key, if the activation has the parameter.
void take_parameter(const char* key, const std::string& activation, bool wanted,
                    const std::optional<double>& given, float& value) {
  if (wanted && !given) {
    throw UsageError("moe.{} = \"\": moe.activation = \"{}\" needs a number there", key,
                     activation);
  }
  if (!wanted && given) {
    throw UsageError("moe.{} = {}: moe.activation = \"{}\" has no such parameter, expected \"\"",
                     key, number_text(*given), activation);
  }
  if (wanted) value = float(*given);
}

gemm::Activation activation(const Options& o) {
  const auto& moe = o.moe;
  const ActivationChoice& choice =
      *std::ranges::find(kActivations, std::string_view(moe.activation), &ActivationChoice::name);
  gemm::Activation a = choice.activation;
  take_parameter("act_alpha", moe.activation, choice.alpha, moe.act_alpha, a.alpha);
  take_parameter("act_limit", moe.activation, choice.limit, moe.act_limit, a.limit);
  take_parameter("act_offset", moe.activation, choice.offset, moe.act_offset, a.offset);
  return a;
}

moe::RouterConfig router_config(const Options& o) {
  moe::RouterConfig r;
  r.experts = o.moe.experts;
  r.top_k = o.moe.top_k;
  r.score = value_of(kScores, o.router.score);
  r.renormalize = o.router.renormalize;
  r.scale = float(o.router.scale);
  r.groups = o.router.groups;
  r.group_top_k = o.router.group_top_k;
  r.aux = value_of(kAuxLosses, o.router.aux);
  r.aux_coef = float(o.router.aux_coef);
  r.z_coef = float(o.router.z_coef);
  r.force_balance = o.router.force_balance;
  return r;
}

}  // namespace

model::Config model_config(const Options& o, int64_t tokenizer_vocab) {
  model::Config c;
  c.vocab = o.model.vocab > 0 ? o.model.vocab : tokenizer_vocab;
  c.d_model = o.model.d_model;
  c.layers = o.model.layers;
  c.heads = o.model.heads;
  c.kv_heads = o.model.kv_heads;
  c.head_dim = o.model.head_dim;
  c.qk_norm = o.model.qk_norm;
  c.rope_theta = o.model.rope_theta;
  c.norm_eps = float(o.model.norm_eps);
  c.tie_embeddings = o.model.tie_embeddings;
  c.dense_layers = o.model.dense_layers;
  c.moe_every = o.model.moe_every;
  c.d_ffn_dense = o.model.d_ffn_dense;
  c.router = router_config(o);
  c.aux_scope = value_of(kScopes, o.router.aux_scope);
  c.d_ffn = o.moe.d_ffn;
  c.shared_d_ffn = o.moe.shared_d_ffn;
  c.shared_gate = o.moe.shared_gate;
  c.activation = activation(o);
  c.expert_bias = o.moe.expert_bias;
  c.glu_interleave = o.moe.glu_interleave;
  c.indexed_experts = o.moe.expert_weights == "indexed";
  c.path = value_of(kPaths, o.moe.path);
  c.delay_wgrad = o.moe.delay_wgrad;
  c.overlap = value_of(kOverlaps, o.ep.overlap);
  c.combine = value_of(kReductions, o.moe.combine);
  c.row_layout = value_of(kLayouts, o.moe.layout);
  c.overflow = moe::OverflowPolicy::kDrop;  // expert_capacity.h decides the consequence
  c.init_std = float(o.init.std);
  c.residual_scale = o.init.residual_scale;
  c.decay_embeddings = o.optim.decay_embeddings;
  c.loss_z_coef = float(o.train.loss_z_coef);
  c.loss_chunk = o.memory.loss_chunk;
  c.recompute = value_of(kRecomputes, o.memory.recompute);
  c.freeze = o.train.freeze;
  try {
    model::check(c);
  } catch (const Error& e) {
    throw UsageError("{}", e.what());
  }
  // Sizes that are legal by themselves; the bytes of more than these could not be counted.
  constexpr int64_t kMostParameters = int64_t{1} << 46;
  if (const int64_t n = model::parameter_count(c); n > kMostParameters) {
    throw UsageError(
        "model.layers x moe.experts x model.d_model x moe.d_ffn = {} x {} x {} x {}: a model of "
        "{:.2g} "
        "parameters is too large",
        c.layers, c.router.experts, c.d_model, c.d_ffn, double(n));
  }
  if (c.vocab < tokenizer_vocab) {
    throw UsageError("model.vocab = {}: the tokenizer \"{}\" has {} ids", c.vocab, o.data.tokenizer,
                     tokenizer_vocab);
  }
  return c;
}

std::string preset_toml(std::string_view name) {
  if (name.empty() || name == "tiny") return {};
  const model::Config c = model::preset(name);
  return text(
      "[model]\nvocab = {}\nd_model = {}\nlayers = {}\nheads = {}\nkv_heads = {}\nhead_dim = {}\n"
      "qk_norm = {}\nnorm_eps = {}\n[moe]\nexperts = {}\ntop_k = {}\nd_ffn = {}\n"
      "[router]\naux = \"{}\"\naux_coef = {}\n",
      c.vocab, c.d_model, c.layers, c.heads, c.kv_heads, c.head_dim, c.qk_norm,
      number_text(c.norm_eps), c.router.experts, c.router.top_k, c.d_ffn,
      name_of(kAuxLosses, c.router.aux), number_text(c.router.aux_coef));
}

}  // namespace moiety::app
