#include "moiety/train/precision.h"

#include <algorithm>
#include <array>
#include <utility>

#include "moiety/train/gathering.h"

namespace moiety::train {
namespace {

model::RecipeKind kind_of(Recipe recipe) {
  return recipe == Recipe::kFp8Tensor  ? model::RecipeKind::kFp8Tensor
         : recipe == Recipe::kFp8Block ? model::RecipeKind::kFp8Block
         : recipe == Recipe::kMxfp8    ? model::RecipeKind::kMxfp8
                                       : model::RecipeKind::kNvfp4;
}

std::optional<QuantSpec> dispatch_spec(const PrecisionSettings& p) {
  if (p.dispatch == DispatchFormat::kMxfp8) return QuantSpec::of(Format::kMxfp8);
  if (p.dispatch != DispatchFormat::kFp8Block) return {};
  QuantSpec spec = QuantSpec::of(Format::kFp8Block1x128);
  spec.pow2_scales = p.pow2_scales;
  return spec;
}

}  // namespace

std::string_view name(Recipe recipe) {
  static constexpr std::array<std::string_view, 6> kNames{"fp32",      "bf16",  "fp8_tensor",
                                                          "fp8_block", "mxfp8", "nvfp4"};
  return kNames[static_cast<size_t>(recipe)];
}

std::string_view name(DispatchFormat format) {
  static constexpr std::array<std::string_view, 4> kNames{"auto", "bf16", "fp8_block", "mxfp8"};
  return kNames[static_cast<size_t>(format)];
}

DType storage_dtype(const TrainConfig& c) {
  return c.precision.recipe == Recipe::kFp32 ? DType::kFloat32 : DType::kBFloat16;
}

DType gradient_wire(const TrainConfig& c) {
  const bool narrow =
      c.optim.grad_dtype == DType::kBFloat16 || c.precision.grad_reduce == GradReduce::kBf16;
  return narrow ? DType::kBFloat16 : DType::kFloat32;
}

bool uses_recipe(const TrainConfig& c, Recipe recipe) {
  const PrecisionSettings& p = c.precision;
  return p.recipe == recipe || (p.switch_step > 0 && p.switch_recipe == recipe);
}

Recipe recipe_of_step(const TrainConfig& c, int64_t step) {
  const bool switched = c.precision.switch_step > 0 && step >= c.precision.switch_step;
  return switched ? c.precision.switch_recipe : c.precision.recipe;
}

bool has_delayed_scales(const TrainConfig& c) {
  return c.precision.scaling == Scaling::kDelayed && uses_recipe(c, Recipe::kFp8Tensor);
}

model::Precision precision_of_recipe(const TrainConfig& c, Recipe recipe) {
  const PrecisionSettings& p = c.precision;
  model::Precision precision;
  if (has_delayed_scales(c)) precision.amax_history = p.amax_history;
  precision.dispatch = dispatch_spec(p);
  if (!is_quantized(recipe)) return precision;
  const model::RecipeKind kind = kind_of(recipe);
  precision.recipe = model::make_recipe(kind, {.pow2_scales = p.pow2_scales,
                                               .rht = p.rht,
                                               .stochastic = p.stochastic,
                                               .weight_2d = p.weight_2d});
  precision.kept = model::kept_layers(kind, c.model.layers);
  if (p.keep_first >= 0) precision.kept.first = p.keep_first;
  if (p.keep_last >= 0) precision.kept.last = p.keep_last;
  precision.attention_linears = p.attention_linears;
  precision.seed = c.run.seed;
  return precision;
}

std::vector<optim::ParamSpec> training_specs(const TrainConfig& c, model::Transformer& model,
                                             const Grid& grid, int rank) {
  model.set_precision(precision_of_recipe(c, recipe_of_step(c, c.precision.switch_step)));
  const std::vector<optim::ParamSpec> last = model.parameter_specs();
  model.set_precision(precision_of_recipe(c, c.precision.recipe));
  std::vector<optim::ParamSpec> specs = model.parameter_specs();
  using Formats = std::pair<std::optional<QuantSpec>, std::optional<QuantSpec>>;
  std::vector<Formats> classes{{}};  // the first class is never in a format
  for (size_t p = 0; p < specs.size(); ++p) {
    const Formats formats{specs[p].format, last[p].format};
    const auto found = std::find(classes.begin(), classes.end(), formats);
    specs[p].format_class = int(found - classes.begin());
    if (found == classes.end()) classes.push_back(formats);
  }
  return shard_specs(std::move(specs), last, grid, rank);
}

}  // namespace moiety::train
