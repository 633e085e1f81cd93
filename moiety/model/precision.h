// The recipes: which linear layers are quantized, and how (docs/spec/trainer.md#recipes).
//
//   tensor                    fp8_block         mxfp8        nvfp4 (after NVIDIA's pre-training
//                                                            recipe, 2025)
//   weight                    E4M3 128x128      E4M3 1x32    E2M1 16x16
//   x for y, dy for dx        E4M3 1x128        E4M3 1x32    E2M1 1x16, dy stochastic
//   dy and x for dw           the same, along tokens         the same, after the 16-point transform
//   layers in bf16 at first   0, 0              0, 0         ceil(L/32), ceil(L/8); none if L < 8
//   and last
//
// fp8_tensor has one scale for each tensor, of its largest element at that time: weights and x are
// E4M3, dy is E5M2, no layer stays in bf16. A tensor is a whole weight, however it is sharded, for
// experts that of one; and the rows of a product on a rank, for experts those of one group. With
// delayed scaling the scales of x and dy come from the steps before (delayed_scales.h).
//
// Recipes apply to the linears of attention, of dense and shared feed-forward networks and of
// experts. Embedding, head, norms, router, the products of attention, the residual and the data
// that travel between ranks are never quantized by them.
#pragma once

#include <cstdint>
#include <optional>

#include "moiety/gemm/quantized_operand.h"
#include "moiety/model/delayed_scales.h"

namespace moiety::model {

enum class RecipeKind : uint8_t { kFp8Tensor, kFp8Block, kMxfp8, kNvfp4 };

struct RecipeOptions {
  bool pow2_scales = true;  // kFp8Block
  bool rht = true;          // kNvfp4: Hadamard transform of the operands of dw
  bool stochastic = true;   // kNvfp4: stochastic rounding of dy
  // weights in tiles; if absent, for kFp8Block and kNvfp4 alone
  std::optional<bool> weight_2d = {};
};

// Throws Error(kUnsupported) for fp8_block without tiles and fp8_tensor with them.
gemm::Recipe make_recipe(RecipeKind kind, const RecipeOptions& options = {});

// Numbers of first and last layers that a recipe leaves in bf16.
struct KeptLayers {
  int64_t first = 0, last = 0;
};
KeptLayers kept_layers(RecipeKind kind, int64_t layers);

struct Precision {
  std::optional<gemm::Recipe> recipe;  // absent: nothing is quantized
  KeptLayers kept;
  bool attention_linears = true;
  // The format in which rows travel to their experts (moe_layer.h, set_dispatch), in the layers
  // that the recipe does not leave in bf16; if absent they travel as they are stored.
  std::optional<QuantSpec> dispatch = {};
  uint64_t seed = 0;  // seed of stochastic rounding
  // Steps of the histories of delayed scaling, which recipes of kFp8Tensor then use; 0: there are
  // none, and scales are those of the tensors at hand. Histories outlive a change of recipe that
  // leaves this as it is.
  int64_t amax_history = 0;
};

// The casting of a linear layer: its recipe, and the scales if they are delayed.
struct LinearRecipe {
  std::optional<gemm::Recipe> recipe = {};
  const DelayedScales* scales = nullptr;
};

// The format in which the owner of a weight with rows of `columns` elements keeps it. If absent the
// weight is kept in bf16 and quantized for every use, with the same bits: 1-D NVFP4, whose two
// directions lie in different order, and rows that are no whole blocks cannot be cast from shards.
std::optional<QuantSpec> kept_format(const gemm::Recipe& recipe, int64_t columns);

}  // namespace moiety::model
