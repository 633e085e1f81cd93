// Grouped linears whose operands are quantized (moiety/gemm/quantized_linear.h). A recipe is a word,
// the same for all layers, so that compiled code is shared. Weights are bfloat16 and quantized for
// every use, which has the bits of weights that are kept in the format.
#include "moiety/base/arena.h"
#include "moiety/gemm/quantized_linear.h"
#include "moiety/model/precision.h"
#include "python/csrc/operators.h"

namespace moiety::torch_ops {
namespace {

gemm::Recipe recipe_of(const Call& call, const std::string& word) {
  using model::RecipeKind;
  for (const auto& [name, kind] : {std::pair{"fp8_tensor", RecipeKind::kFp8Tensor},
                                   {"fp8_block", RecipeKind::kFp8Block},
                                   {"mxfp8", RecipeKind::kMxfp8},
                                   {"nvfp4", RecipeKind::kNvfp4}}) {
    if (word == name) return model::make_recipe(kind);
  }
  fail(ErrorKind::kInvalidArgument,
       "moiety::{}: recipe is '{}', expected fp8_tensor, fp8_block, mxfp8 or nvfp4", call.name(),
       word);
}

// Bytes of an arena beside the operands': what alignment takes of each allocation, and offsets.
int64_t rest_bytes(int64_t experts) { return 32 * 256 + 16 * (experts + 2); }

// A layer for the time of one product. `w` [E, N, C] tells its shape; weight gradients do not read
// it. The arena lies in memory of torch's.
struct Layer {
  gemm::Recipe recipe;
  gemm::QuantizedLinear linear;
  Arena arena;

  Layer(Call& call, const std::string& word, const TensorView& w, int64_t rows,
        int64_t gemm::LinearBytes::*product, const Optional& rng = {})
      : recipe(recipe_of(call, word)),
        arena(call.name(), call.bytes(quantized_linear_bytes(recipe, {.experts = w.size(0),
                                                                      .n = w.size(1),
                                                                      .k = w.size(2),
                                                                      .rows = rows,
                                                                      .in_format = false}).*
                                          product +
                                      rest_bytes(w.size(0)))) {
    linear.recipe = &recipe;
    linear.weight.values = w;
    const TensorView state = call.whole("rng", rng, DType::kInt64, {2});
    if (recipe.gradient.rounding != Rounding::kStochastic || !state.defined()) return;
    linear.gradient_bits = {.rng = static_cast<const quant::RngState*>(state.raw()),
                            .expert = 1,
                            .full_cols = w.size(1)};
  }
};

void check_rng(const Call& call, const std::string& recipe, const Optional& rng) {
  MOIETY_CHECK(recipe != "nvfp4" || rng,
               "moiety::{}: nvfp4 rounds gradients with rng, and there "
               "is none",
               call.name());
}

void wgrad(Call& call, const Tensor& dy, const Tensor& x, const Tensor& splits, const Optional& rng,
           const Tensor& out, const Optional& beta, float otherwise, const std::string& recipe) {
  check_rng(call, recipe, rng);
  const int64_t rows = x.size(0);
  const gemm::Groups groups = call.groups(splits, rows);
  const TensorView dy_RN = call.view("dy", dy, DType::kBFloat16, {rows, -1});
  const TensorView x_RC = call.view("x", x, DType::kBFloat16, {rows, -1});
  const TensorView target = call.view("main_grad", out, call.operand("main_grad", out),
                                      {groups.experts, dy_RN.size(1), x_RC.size(1)});
  Layer layer(call, recipe, target, rows, &gemm::LinearBytes::weight_gradient, rng);
  gemm::quantized_grouped_weight_gradient(
      layer.linear, groups, {dy_RN, {}}, {x_RC, {}}, target,
      {otherwise, call.whole("beta", beta, DType::kFloat32, {1})}, layer.arena, call.stream());
  call.check_data();
}

}  // namespace

Tensor quantized_linear(Tensor x, Tensor w, Tensor splits, Optional bias, Optional row_scale,
                        Optional /*main_grad*/, Optional /*rng*/, std::string recipe) {
  return guarded("quantized_linear", [&] {
    Call call("quantized_linear", x);
    const TensorView x_RC = call.view("x", x, DType::kBFloat16, {-1, -1});
    const int64_t rows = x_RC.size(0);
    call.check_experts(splits, "w", w);
    const gemm::Groups groups = call.groups(splits, rows);
    const TensorView w_ENC = call.whole("w", w, DType::kBFloat16, {-1, -1, x_RC.size(1)});
    const TensorView bias_EN =
        call.whole("bias", bias, DType::kBFloat16, {groups.experts, w_ENC.size(1)});
    const Tensor out = call.empty({rows, w_ENC.size(1)}, x.scalar_type());
    Layer layer(call, recipe, w_ENC, rows, &gemm::LinearBytes::forward);
    gemm::quantized_grouped_forward(layer.linear, groups, {x_RC, {}}, view_of(out), bias_EN,
                                    call.whole("row_scale", row_scale, DType::kFloat32, {rows}),
                                    layer.arena, call.stream());
    gemm::zero_dead_rows(groups, view_of(out), call.stream());
    return out;
  });
}

Tensor quantized_linear_dgrad(Tensor dy, Tensor w, Tensor splits, Optional rng,
                              std::string recipe) {
  return guarded("quantized_linear_dgrad", [&] {
    Call call("quantized_linear_dgrad", dy);
    check_rng(call, recipe, rng);
    const int64_t rows = dy.size(0);
    const gemm::Groups groups = call.groups(splits, rows);
    const TensorView w_ENC = call.whole("w", w, DType::kBFloat16, {groups.experts, -1, -1});
    const TensorView dy_RN = call.view("dy", dy, DType::kBFloat16, {rows, w_ENC.size(1)});
    const Tensor out = call.empty({rows, w_ENC.size(2)}, w.scalar_type());
    Layer layer(call, recipe, w_ENC, rows, &gemm::LinearBytes::input_gradient, rng);
    gemm::quantized_grouped_input_gradient(layer.linear, groups, {dy_RN, {}}, view_of(out),
                                           layer.arena, call.stream());
    gemm::zero_dead_rows(groups, view_of(out), call.stream());
    return out;
  });
}

Tensor quantized_linear_wgrad(Tensor dy, Tensor x, Tensor splits, Optional rng,
                              std::string recipe) {
  return guarded("quantized_linear_wgrad", [&] {
    Call call("quantized_linear_wgrad", x);
    const Tensor out = call.empty({splits.size(0), dy.size(1), x.size(1)}, x.scalar_type());
    wgrad(call, dy, x, splits, rng, out, {}, 0, recipe);
    return out;
  });
}

void quantized_linear_wgrad_acc(Tensor dy, Tensor x, Tensor splits, Tensor main_grad, Optional beta,
                                Optional rng, std::string recipe) {
  guarded("quantized_linear_wgrad_acc", [&] {
    Call call("quantized_linear_wgrad_acc", x);
    wgrad(call, dy, x, splits, rng, main_grad, beta, 1, recipe);
  });
}

}  // namespace moiety::torch_ops
