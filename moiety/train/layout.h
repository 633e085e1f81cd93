// The ranks of a training: the grid that its degrees make, and the data that each trains on.
#pragma once

#include <string>

#include "moiety/checkpoint/manifest.h"
#include "moiety/gtp/layout.h"
#include "moiety/train/config.h"

namespace moiety::train {

using gtp::Grid;

inline int rank_count(const Grid& grid) { return grid.tp * grid.gtp * grid.dp; }
// The number of ranks that train on different sequences; those of one tp group share theirs.
inline int data_ranks(const Grid& grid) { return grid.gtp * grid.dp; }
inline int data_rank(const Grid& grid, int rank) { return rank / grid.tp; }
// The degrees that are not 1, of both grids, as text: "8 ranks (gtp 4, tp 2, ep 8)".
std::string describe_layout(const Grid& grid);

// The passes of a step on one rank.
int64_t micro_steps(const TrainConfig& config, const Grid& grid);

// The grid of config.parallel over config.run.ranks ranks. Throws UsageError naming keys and values
// that do not fit each other or the model.
Grid check_layout(const TrainConfig& config);

// The same in the form that a checkpoint holds.
checkpoint::RankLayout rank_layout(const Grid& grid);

}  // namespace moiety::train
