// What several keys say together, checked before anything is allocated. What the model says is in
// model_options.h.
#pragma once

#include <cstdint>

#include "apps/moiety/options.h"

namespace moiety::app {

// The grids of spec trainer, 6: rank = dp for what all ranks hold, rank = ep + EP * edp for
// experts.
struct Grid {
  int ranks = 1;
  int dp = 1;  // data ranks: all of them
  int ep = 1;
  int edp = 1;
};

// Each throws UsageError naming keys and values.
Grid check_layout(const Options& options);
// Length and batches, data and start of a training.
void check_training(const Options& options, const Grid& grid);

// From train.steps or train.tokens.
int64_t total_steps(const Options& options);

}  // namespace moiety::app
