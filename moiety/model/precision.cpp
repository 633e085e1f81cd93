#include "moiety/model/precision.h"

#include "moiety/base/integer.h"

namespace moiety::model {
namespace {

Format weight_format(RecipeKind kind, std::optional<bool> weight_2d) {
  switch (kind) {
    case RecipeKind::kFp8Tensor:
      if (weight_2d.value_or(false)) {
        fail(ErrorKind::kUnsupported,
             "recipe fp8_tensor: its weights have one scale each, weight_2d cannot be true");
      }
      return Format::kFp8Tensor;
    case RecipeKind::kFp8Block:
      if (!weight_2d.value_or(true)) {
        fail(ErrorKind::kUnsupported,
             "recipe fp8_block: its weights are scaled by 128x128, weight_2d cannot be false");
      }
      return Format::kFp8Block128x128;
    case RecipeKind::kMxfp8:
      return weight_2d.value_or(false) ? Format::kMxfp8Tile32 : Format::kMxfp8;
    case RecipeKind::kNvfp4:
      return weight_2d.value_or(true) ? Format::kNvfp4Tile16 : Format::kNvfp4;
  }
  return Format::kMxfp8;
}

Format row_format(RecipeKind kind) {
  return kind == RecipeKind::kFp8Tensor  ? Format::kFp8Tensor
         : kind == RecipeKind::kFp8Block ? Format::kFp8Block1x128
         : kind == RecipeKind::kMxfp8    ? Format::kMxfp8
                                         : Format::kNvfp4;
}

}  // namespace

gemm::Recipe make_recipe(RecipeKind kind, const RecipeOptions& options) {
  gemm::Recipe r{QuantSpec::of(weight_format(kind, options.weight_2d)),
                 QuantSpec::of(row_format(kind)), QuantSpec::of(row_format(kind))};
  if (kind == RecipeKind::kFp8Tensor) r.gradient.element = DType::kE5M2;
  if (kind == RecipeKind::kFp8Block) {
    for (QuantSpec* spec : {&r.weight, &r.input, &r.gradient}) {
      spec->pow2_scales = options.pow2_scales;
    }
  }
  if (kind == RecipeKind::kNvfp4) {
    r.input.rht_col = r.gradient.rht_col = options.rht;
    if (options.stochastic) r.gradient.rounding = Rounding::kStochastic;
  }
  return r;
}

KeptLayers kept_layers(RecipeKind kind, int64_t layers) {
  if (kind != RecipeKind::kNvfp4 || layers < 8) return {};
  return {ceil_div(layers, 32), ceil_div(layers, 8)};
}

std::optional<QuantSpec> kept_format(const gemm::Recipe& recipe, int64_t columns) {
  const QuantSpec& spec = recipe.weight;
  if (spec.format == Format::kNvfp4) return std::nullopt;
  if (is_fp4(spec.format) && columns % 16 != 0) return std::nullopt;
  return spec;
}

}  // namespace moiety::model
