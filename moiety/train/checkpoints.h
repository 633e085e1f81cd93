// Finding the checkpoints of a run.
#pragma once

#include <string>
#include <vector>

#include "moiety/train/config.h"

namespace moiety::train {

// The checkpoint that `path` names: itself, or the newest complete one of a run directory or of its
// checkpoints/. Throws CheckpointError if there is none.
std::string find_checkpoint(const std::string& path);

// The checkpoints from which a run may continue, best first: a later one is used if an earlier one
// is damaged. If there is none the run starts anew. The rest of an interrupted save is cleared away
// first. Follows run.resume; throws CheckpointError or UsageError where that cannot be.
std::vector<std::string> resume_candidates(const TrainConfig& config);

}  // namespace moiety::train
