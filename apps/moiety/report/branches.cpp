#include "apps/moiety/report/branches.h"

#include <filesystem>

#include "moiety/checkpoint/file_system.h"
#include "moiety/checkpoint/retention.h"

namespace moiety::app {

std::vector<std::string> list_steps(const std::string& directory) {
  const std::vector<int64_t> newest_first = checkpoint::steps_in(directory);
  std::vector<std::string> steps;
  for (auto step = newest_first.rbegin(); step != newest_first.rend(); ++step) {
    steps.push_back(directory + "/" + checkpoint::step_name(*step));
  }
  return steps;
}

std::vector<LeftBranch> list_left_branches(const std::string& directory) {
  std::vector<LeftBranch> branches;
  for (const std::string& name : checkpoint::list(checkpoint::posix(), directory)) {
    if (!name.starts_with("branch-")) continue;
    LeftBranch branch{name, list_steps(directory + "/" + name)};
    if (!branch.checkpoints.empty()) branches.push_back(std::move(branch));
  }
  return branches;
}

std::string checkpoints_of(const std::string& run) {
  const std::filesystem::path inner = std::filesystem::path(run) / "checkpoints";
  return std::filesystem::is_directory(inner) ? inner.string() : run;
}

}  // namespace moiety::app
