// What several values of a configuration say together, checked before anything is allocated; the
// layout of ranks is checked in layout.h. Each throws UsageError naming keys and values.
#pragma once

#include "moiety/base/device.h"
#include "moiety/train/config.h"
#include "moiety/train/layout.h"

namespace moiety::train {

// Length and batches, capacity, precision.
void check_training(const TrainConfig& config, const Grid& grid);
// The grid's tp must cut every weight, and part no block of a recipe.
void check_cuts(const TrainConfig& config, const Grid& grid);
// Whether steps can be captured on this device, if that is demanded.
void check_graph(const TrainConfig& config, Device device);

// Steps of the run, from train.steps or train.tokens.
int64_t total_steps(const TrainConfig& config);

}  // namespace moiety::train
