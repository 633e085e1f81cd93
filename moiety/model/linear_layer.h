// A linear layer of the model with its parameter, in the storage type or quantized by a recipe.
// Gradients land in the parameter's main_grad, which they overwrite or add to.
#pragma once

#include <optional>

#include "moiety/base/rng.h"
#include "moiety/gemm/quantized_linear.h"
#include "moiety/model/block_ops.h"
#include "moiety/model/precision.h"

namespace moiety::model {

class LinearLayer {
 public:
  LinearLayer() = default;
  // `layout` tells which part of the whole weight this rank has; only for dense weights.
  explicit LinearLayer(const gtp::Layout& layout) : layout_(layout) {}

  // Sets the recipe for products; without one they are in the storage type. It also changes the
  // parameter's spec, see the specs() of blocks.
  void set_recipe(const LinearRecipe& recipe) {
    recipe_ = recipe.recipe;
    scales_ = recipe.scales;
  }
  void bind(optim::Parameter* p);

  const std::optional<gemm::Recipe>& recipe() const { return recipe_; }
  optim::Parameter& parameter() const { return *p_; }
  const gtp::Layout& layout() const { return layout_; }
  // Adds to `spec` the format in which the weight is kept.
  optim::ParamSpec with_format(optim::ParamSpec spec) const;

  // y = round(x w^T + residual); the residual is optional.
  void forward(const Pass& pass, TensorView x, TensorView y, TensorView residual) const;
  // dx = round(dy w)
  void input_gradient(const Pass& pass, TensorView dy, TensorView dx) const;
  // main_grad (+)= dy^T x; nothing if the weight is frozen
  void weight_gradient(const Pass& pass, TensorView dy, TensorView x) const;

  // The description of experts that gemm's products take; `first_expert` is the first one's global
  // number.
  gemm::QuantizedLinear quantized_experts(const Pass& pass, const gemm::LinearWeight& weight,
                                          int32_t first_expert) const;

 private:
  gtp::Work work(const Pass& pass, int64_t rows) const;
  gemm::LinearWeight read(const Pass& pass, gtp::Phase phase, int64_t rows) const;
  gemm::QuantizedLinear linear(const Pass& pass, const gemm::LinearWeight& weight) const;
  gemm::QuantizedLinear quantized(const Pass& pass, const gemm::LinearWeight& weight) const;

  gtp::Layout layout_;
  std::optional<gemm::Recipe> recipe_;
  const DelayedScales* scales_ = nullptr;
  optim::Parameter* p_ = nullptr;
  uint32_t gradient_id_ = 0;
};

}  // namespace moiety::model
