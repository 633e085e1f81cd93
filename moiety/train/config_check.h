// Checks of values of a configuration that depend on each other, made before anything is allocated;
// layout.h checks the layout of ranks. Each throws UsageError naming keys and values.
#pragma once

#include <optional>
#include <string>

#include "moiety/base/device.h"
#include "moiety/train/config.h"
#include "moiety/train/layout.h"

namespace moiety::train {

// Checks length and batches, capacity, and precision.
void check_training(const TrainConfig& config, const Grid& grid);
// Checks that the grid's tp cuts every weight and parts no block of a recipe.
void check_cuts(const TrainConfig& config, const Grid& grid);
// Why ranks in this layout cannot compute on GPUs, naming the key; empty if they can.
std::optional<std::string> refusal_of_gpus(const Grid& grid);
// Checks that ranks in this layout can compute on this device.
void check_gpu_layout(const Grid& grid, Device device);
// Checks that steps can be captured on this device, if that is demanded.
void check_graph(const TrainConfig& config, Device device);
// Checks that micro-batches can take turns on this device, if that is demanded.
void check_overlap(const TrainConfig& config, Device device);
// Checks that the path which the model requires for its experts is there on this device.
void check_path(const TrainConfig& config, Device device);

// The steps of the run, from train.steps or train.tokens.
int64_t total_steps(const TrainConfig& config);

}  // namespace moiety::train
