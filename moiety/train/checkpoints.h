// Finding the checkpoints of a run.
#pragma once

#include <string>
#include <vector>

#include "moiety/checkpoint/branches.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/train/config.h"

namespace moiety::train {

// The checkpoint that `path` names: itself, the newest complete one of a run directory or of its
// checkpoints/, or the one that the file checkpoints/best or checkpoints/latest names. Throws CheckpointError if there is none.
std::string find_checkpoint(const std::string& path);

// The modules of a model's experts, as key_remap takes them. The checkpoint's shapes tell whether
// fc1 is gated.
std::vector<checkpoint::ExpertModule> expert_modules(const model::Config& config,
                                                     const checkpoint::Manifest& manifest);

// The checkpoints from which a run may continue, best first: a later one is used if an earlier one
// is damaged. If there is none the run starts anew. The rest of an interrupted save is cleared away
// first. Follows run.resume, and the branch of the last start (checkpoint/branches.h): a checkpoint
// that run.resume names yields to newer ones of the branch that began there with the same
// run.variant, so the same command may be started again. Throws CheckpointError or UsageError where that cannot be.
std::vector<std::string> resume_candidates(const TrainConfig& config);

// Makes the directory follow a start: from the checkpoint `loaded`, which run.resume named, or, if
// that is empty, before the first step. Begins a branch unless the current one began so. Returns
// the branch of the run, and a sentence if it has just begun. For rank 0.
struct Following {
  checkpoint::Branch branch;
  std::string sentence;
};
Following follow_start(const TrainConfig& config, const std::string& loaded);

}  // namespace moiety::train
