// Finding the checkpoints of a run.
#pragma once

#include <string>
#include <vector>

#include "moiety/train/config.h"

namespace moiety::train {

// The checkpoint that `path` names: itself, or the newest complete one of a run directory or of its
// checkpoints/. Throws CheckpointError if there is none.
std::string find_checkpoint(const std::string& path);

// The checkpoints that a run continues from, best first; later ones are for the case that an
// earlier one is damaged. Empty: it starts anew. What a crash left of a save is cleared away first.
// After run.resume; throws CheckpointError or UsageError where that cannot be.
std::vector<std::string> resume_candidates(const TrainConfig& config);

}  // namespace moiety::train
