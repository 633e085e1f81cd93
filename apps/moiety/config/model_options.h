// From configuration keys to the model.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "apps/moiety/config/options.h"
#include "apps/moiety/config/options_check.h"
#include "moiety/base/dtype.h"
#include "moiety/model/config.h"
#include "moiety/model/transformer.h"

namespace moiety::app {

// The model of these options; `tokenizer_vocab` is used where model.vocab is 0. Throws UsageError
// naming the first key that does not fit the others.
model::Config model_config(const Options& options, int64_t tokenizer_vocab);

// Storage of activations, and of weights that are not quantized.
DType storage_dtype(const Options& options);

// What ranks send of gradients.
DType gradient_wire(const Options& options);

// The recipe of step `step` (the first is 1), and what it means for the model.
std::string_view recipe_of_step(const Options& options, int64_t step);
model::Precision precision_of_recipe(const Options& options, std::string_view recipe);

// Throws UsageError where the grid's tp cannot cut a weight, or parts blocks of a recipe.
void check_cuts(const Options& options, const model::Config& model, const Grid& grid);

// The parameters of `model`, which keeps the precision of the first step, with classes of
// formats: those that change their formats together in the run share buckets. Of weights that gtp
// and egtp cut, rank's shards.
std::vector<optim::ParamSpec> training_specs(const Options& options, model::Transformer& model,
                                             const Grid& grid, int rank);

// The sizes of a published model (model::preset) as TOML; nothing for "tiny", the defaults, and "".
std::string preset_toml(std::string_view name);

}  // namespace moiety::app
