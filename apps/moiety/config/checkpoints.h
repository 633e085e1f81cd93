// Finding, loading and saving checkpoints of a run.
#pragma once

#include <string>
#include <vector>

#include "apps/moiety/config/options.h"
#include "apps/moiety/config/options_check.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/train/rank_model.h"

namespace moiety::app {

// The checkpoint that `path` names: itself, or the newest complete one of a run directory or of its
// checkpoints/. Throws CheckpointError if there is none.
std::string find_checkpoint(const std::string& path);

// The checkpoints that a run continues from, best first; later ones are for the case that an
// earlier one is damaged. Empty: it starts anew. After run.resume; throws CheckpointError or
// UsageError where that cannot be.
std::vector<std::string> resume_candidates(const Options& options, const std::string& directory);

// A checkpoint without its tensors.
struct CheckpointInfo {
  std::string path;
  int64_t step = 0;
  Options options;
};
CheckpointInfo read_checkpoint_info(const std::string& path);

checkpoint::RankLayout rank_layout(const Grid& grid);

// Weights alone into pieces of slot "weight" and the routers' biases. Collective.
checkpoint::RunState load_weights(const std::string& path, const optim::StateView& weights,
                                  RankModel& model);

}  // namespace moiety::app
