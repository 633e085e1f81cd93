// The precision settings of a run, applied to its model step by step.
#pragma once

#include <vector>

#include "moiety/base/dtype.h"
#include "moiety/model/precision.h"
#include "moiety/model/transformer.h"
#include "moiety/train/config.h"
#include "moiety/train/layout.h"

namespace moiety::train {

inline bool is_quantized(Recipe recipe) {
  return recipe != Recipe::kFp32 && recipe != Recipe::kBf16;
}

// The dtype of activations, and of weights that are not quantized.
DType storage_dtype(const TrainConfig& config);

// The dtype in which ranks send gradients.
DType gradient_wire(const TrainConfig& config);

// Whether some step has the recipe.
bool uses_recipe(const TrainConfig& config, Recipe recipe);
// Whether x and dy of some step are cast with delayed scales.
bool has_delayed_scales(const TrainConfig& config);

// The recipe of step `step` (the first is 1), and the model's precision under it.
Recipe recipe_of_step(const TrainConfig& config, int64_t step);
model::Precision precision_of_recipe(const TrainConfig& config, Recipe recipe);

// The parameters of `model`, which keeps the precision of the first step. They have classes of
// formats: those that change their formats together in the run share buckets. Weights that gtp and
// egtp cut appear as the rank's shards.
std::vector<optim::ParamSpec> training_specs(const TrainConfig& config, model::Transformer& model,
                                             const Grid& grid, int rank);

}  // namespace moiety::train
