// The branches that a run has left: their checkpoints lie aside, in folders of their own.
//
//    checkpoints/branch-1/step-00000008
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

struct LeftBranch {
  std::string name;                      // of its folder
  std::vector<std::string> checkpoints;  // their directories, by step
};
// The branches whose checkpoints lie aside in `directory`, a run's checkpoints/.
std::vector<LeftBranch> list_left_branches(const std::string& directory);

// The directories of a run's checkpoints, complete or not, without those that lie aside, by step.
std::vector<std::string> list_steps(const std::string& directory);
// The checkpoints/ of a run directory, or the directory itself if that is what it is.
std::string checkpoints_of(const std::string& run);

}  // namespace moiety::app
