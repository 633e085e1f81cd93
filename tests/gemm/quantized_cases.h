// Recipes of quantized linears, and rows that tell them apart.
#pragma once

#include "moiety/gemm/quantized_mlp.h"
#include "tests/gemm/groups.h"

namespace moiety::gemm {

struct RecipeCase {
  std::string name;
  Recipe recipe;
};
inline void PrintTo(const RecipeCase& c, std::ostream* out) { *out << c.name; }

inline Recipe recipe_of(Format weight, Format rows) {
  return {QuantSpec::of(weight), QuantSpec::of(rows), QuantSpec::of(rows)};
}

inline Recipe nvfp4(bool rht, bool stochastic, Format weight) {
  Recipe r = recipe_of(weight, Format::kNvfp4);
  r.input.rht_col = r.gradient.rht_col = rht;
  if (stochastic) r.gradient.rounding = Rounding::kStochastic;
  return r;
}

inline std::vector<RecipeCase> recipe_cases() {
  Recipe fp32_scales = recipe_of(Format::kFp8Block128x128, Format::kFp8Block1x128);
  for (QuantSpec* s : {&fp32_scales.weight, &fp32_scales.input, &fp32_scales.gradient}) {
    s->pow2_scales = false;
  }
  Recipe stochastic_mxfp8 = recipe_of(Format::kMxfp8, Format::kMxfp8);
  stochastic_mxfp8.gradient.rounding = Rounding::kStochastic;
  Recipe fp8_tensor = recipe_of(Format::kFp8Tensor, Format::kFp8Tensor);
  fp8_tensor.gradient.element = DType::kE5M2;
  return {{"fp8_tensor", fp8_tensor},
          {"fp8_block", recipe_of(Format::kFp8Block128x128, Format::kFp8Block1x128)},
          {"fp8_block_fp32_scales", fp32_scales},
          {"mxfp8", recipe_of(Format::kMxfp8, Format::kMxfp8)},
          {"mxfp8_stochastic", stochastic_mxfp8},
          {"mxfp8_tiles", recipe_of(Format::kMxfp8Tile32, Format::kMxfp8)},
          {"nvfp4", nvfp4(true, true, Format::kNvfp4Tile16)},
          {"nvfp4_nearest", nvfp4(true, false, Format::kNvfp4Tile16)},
          {"nvfp4_plain", nvfp4(false, true, Format::kNvfp4Tile16)},
          {"nvfp4_weight_rows", nvfp4(true, true, Format::kNvfp4)}};
}

// Activations of very different rows and columns.
inline Tensor activations(int64_t rows, int64_t cols, uint32_t id) {
  Tensor x = normal_tensor(DType::kBFloat16, {rows, cols}, id);
  for (int64_t i = 0; i < rows * cols; ++i) {
    put(x, i, get(x, i) * std::exp2(double(i % 7) - double(i / cols % 5)));
  }
  return x;
}

}  // namespace moiety::gemm
