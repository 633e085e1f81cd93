#include "apps/moiety/config/model_options.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "apps/moiety/exit_code.h"
#include "moiety/base/number_text.h"
#include "moiety/train/gathering.h"

namespace moiety::app {
namespace {

// Names of an enum's values, as the table of keys has them.
template <class E, size_t kCount>
using Names = std::array<std::pair<std::string_view, E>, kCount>;

constexpr Names<moe::Score, 2> kScores{
    {{"softmax", moe::Score::kSoftmax}, {"sigmoid", moe::Score::kSigmoid}}};
constexpr Names<moe::AuxLoss, 4> kAuxLosses{{{"none", moe::AuxLoss::kNone},
                                             {"switch", moe::AuxLoss::kSwitch},
                                             {"hf", moe::AuxLoss::kHf},
                                             {"sequence", moe::AuxLoss::kSequence}}};
constexpr Names<model::AuxScope, 2> kScopes{
    {{"micro_batch", model::AuxScope::kMicroBatch}, {"global", model::AuxScope::kGlobal}}};
constexpr Names<moe::Reduction, 3> kReductions{{{"rank", moe::Reduction::kRank},
                                                {"rank_fp32", moe::Reduction::kRankFp32},
                                                {"token", moe::Reduction::kToken}}};
// Norms' outputs and activations are never kept.
constexpr Names<model::Recompute, 4> kRecomputes{{{"none", model::Recompute::kNone},
                                                  {"norm", model::Recompute::kNone},
                                                  {"moe", model::Recompute::kMoe},
                                                  {"full", model::Recompute::kFull}}};
constexpr Names<model::RecipeKind, 3> kRecipes{{{"fp8_block", model::RecipeKind::kFp8Block},
                                                {"mxfp8", model::RecipeKind::kMxfp8},
                                                {"nvfp4", model::RecipeKind::kNvfp4}}};
template <class E, size_t kCount>
E value_of(const Names<E, kCount>& names, std::string_view name) {
  for (const auto& [text, value] : names) {
    if (text == name) return value;
  }
  throw UsageError("unknown value '{}'", name);  // the table has refused it already
}

template <class E, size_t kCount>
std::string_view name_of(const Names<E, kCount>& names, E value) {
  for (const auto& [text, v] : names) {
    if (v == value) return text;
  }
  return "";
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
  c.delay_wgrad = o.moe.delay_wgrad;
  c.combine = value_of(kReductions, o.moe.combine);
  c.overflow = moe::OverflowPolicy::kDrop;  // expert_capacity.h decides what follows
  c.init_std = float(o.init.std);
  c.residual_scale = o.init.residual_scale;
  c.decay_embeddings = o.optim.decay_embeddings;
  c.loss_z_coef = float(o.train.loss_z_coef);
  c.loss_chunk = o.memory.loss_chunk;
  c.recompute = value_of(kRecomputes, o.memory.recompute);
  try {
    model::check(c);
  } catch (const Error& e) {
    throw UsageError("{}", e.what());
  }
  if (c.vocab < tokenizer_vocab) {
    throw UsageError("model.vocab = {}: the tokenizer \"{}\" has {} ids", c.vocab, o.data.tokenizer,
                     tokenizer_vocab);
  }
  return c;
}

void check_cuts(const Options& o, const model::Config& c, const Grid& grid) {
  try {
    for (const std::string_view recipe :
         {std::string_view(o.precision.recipe), recipe_of_step(o, o.precision.switch_step)}) {
      model::check_tp(c, precision_of_recipe(o, recipe), grid.tp);
    }
  } catch (const Error& e) {
    throw UsageError("{}", e.what());
  }
}

DType storage_dtype(const Options& o) {
  return o.precision.recipe == "fp32" ? DType::kFloat32 : DType::kBFloat16;
}

DType gradient_wire(const Options& o) {
  const bool narrow = o.optim.grad_dtype == "bf16" || o.precision.grad_reduce == "bf16";
  return narrow ? DType::kBFloat16 : DType::kFloat32;
}

std::string_view recipe_of_step(const Options& o, int64_t step) {
  const bool switched = o.precision.switch_step > 0 && step >= o.precision.switch_step;
  return switched ? o.precision.switch_recipe : o.precision.recipe;
}

model::Precision precision_of_recipe(const Options& o, std::string_view recipe) {
  model::Precision precision;
  if (o.precision.dispatch == "fp8_block") {
    precision.dispatch = QuantSpec::of(Format::kFp8Block1x128);
    precision.dispatch->pow2_scales = o.precision.pow2_scales;
  } else if (o.precision.dispatch == "mxfp8") {
    precision.dispatch = QuantSpec::of(Format::kMxfp8);
  }
  if (recipe == "fp32" || recipe == "bf16") return precision;
  const model::RecipeKind kind = value_of(kRecipes, recipe);
  model::RecipeOptions options;
  options.pow2_scales = o.precision.pow2_scales;
  options.rht = o.precision.rht;
  options.stochastic = o.precision.stochastic;
  if (o.precision.weight_2d != "auto") options.weight_2d = o.precision.weight_2d == "true";
  precision.recipe = model::make_recipe(kind, options);
  precision.kept = model::kept_layers(kind, o.model.layers);
  if (o.precision.keep_first >= 0) precision.kept.first = o.precision.keep_first;
  if (o.precision.keep_last >= 0) precision.kept.last = o.precision.keep_last;
  precision.attention_linears = o.precision.attention_linears;
  precision.seed = uint64_t(o.run.seed);
  return precision;
}

std::vector<optim::ParamSpec> training_specs(const Options& o, model::Transformer& model,
                                             const Grid& grid, int rank) {
  model.set_precision(precision_of_recipe(o, recipe_of_step(o, o.precision.switch_step)));
  const std::vector<optim::ParamSpec> last = model.parameter_specs();
  model.set_precision(precision_of_recipe(o, o.precision.recipe));
  std::vector<optim::ParamSpec> specs = model.parameter_specs();
  using Formats = std::pair<std::optional<QuantSpec>, std::optional<QuantSpec>>;
  std::vector<Formats> classes{{}};  // the first: never in a format
  for (size_t p = 0; p < specs.size(); ++p) {
    const Formats formats{specs[p].format, last[p].format};
    const auto found = std::find(classes.begin(), classes.end(), formats);
    specs[p].format_class = int(found - classes.begin());
    if (found == classes.end()) classes.push_back(formats);
  }
  return shard_specs(std::move(specs), last, grid, rank);
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
