// The search for the checkpoints of a run, and their loading.
#pragma once

#include <string>
#include <vector>

#include "moiety/checkpoint/manifest.h"
#include "moiety/train/config.h"
#include "moiety/train/rank_model.h"

namespace moiety::train {

// The checkpoint that `path` names: itself, or the newest complete one of a run directory or of its
// checkpoints/. Throws CheckpointError if there is none.
std::string find_checkpoint(const std::string& path);

// The checkpoints from which a run may continue, best first: a later one is used if an earlier one
// is damaged. If there is none the run starts anew. The rest of an interrupted save is cleared away
// first. Follows run.resume; throws CheckpointError or UsageError where that cannot be.
std::vector<std::string> resume_candidates(const TrainConfig& config);

// Loads only weights, into pieces of slot "weight" and the routers' biases. Collective.
checkpoint::RunState load_weights(const std::string& path, const optim::StateView& weights,
                                  RankModel& model);

}  // namespace moiety::train
