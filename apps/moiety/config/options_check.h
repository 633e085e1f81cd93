// What several keys say together, checked before anything is allocated. What the model says is in
// model_options.h.
#pragma once

#include <cstdint>
#include <string>

#include "apps/moiety/config/options.h"
#include "moiety/gtp/layout.h"

namespace moiety::app {

using gtp::Grid;

inline int rank_count(const Grid& grid) { return grid.tp * grid.gtp * grid.dp; }
// Ranks that train on different sequences: those of one tp group share theirs.
inline int data_ranks(const Grid& grid) { return grid.gtp * grid.dp; }
inline int data_rank(const Grid& grid, int rank) { return rank / grid.tp; }
// "8 ranks (gtp 4, tp 2, ep 8)": the degrees that are not 1, of both grids.
std::string describe_layout(const Grid& grid);

// Each throws UsageError naming keys and values.
Grid check_layout(const Options& options);
// Length and batches, data and start of a training.
void check_training(const Options& options, const Grid& grid);

// From train.steps or train.tokens.
int64_t total_steps(const Options& options);

}  // namespace moiety::app
