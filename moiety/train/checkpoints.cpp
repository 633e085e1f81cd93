#include "moiety/train/checkpoints.h"

#include <filesystem>

#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/checkpoint/retention.h"

namespace moiety::train {
namespace fs = std::filesystem;

std::string find_checkpoint(const std::string& path) {
  const auto type_of = [](const fs::path& p) {
    std::error_code error;
    const fs::file_type type = fs::status(p, error).type();
    if (type == fs::file_type::none) throw IoError("{}: {}", p.string(), error.message());
    return type;
  };
  const fs::file_type type = type_of(path);
  if (type == fs::file_type::not_found) throw CheckpointError("{}: no such directory", path);
  if (type != fs::file_type::directory) throw CheckpointError("{}: is not a directory", path);
  if (type_of(fs::path(path) / "COMMIT") != fs::file_type::not_found) return path;
  const fs::path inner = fs::path(path) / "checkpoints";
  const std::string directory = type_of(inner) == fs::file_type::directory ? inner.string() : path;
  const auto newest = checkpoint::find_newest_complete(directory);
  if (!newest) throw CheckpointError("{}: holds no complete checkpoint", path);
  return *newest;
}

std::vector<std::string> resume_candidates(const TrainConfig& config) {
  const std::string directory = config.checkpoints();
  std::error_code none;
  const bool exists = fs::is_directory(directory, none);
  if (exists) checkpoint::recover(directory);
  const ResumeFrom resume = config.run.resume;
  if (resume == ResumeFrom::kPath) {
    try {
      return {find_checkpoint(config.run.checkpoint)};
    } catch (const CheckpointError& e) {
      throw CheckpointError("run.resume (auto, never, must or a checkpoint): {}", e.what());
    }
  }
  checkpoint::CheckpointList list;
  if (exists) list = checkpoint::list_checkpoints(directory);
  if (resume == ResumeFrom::kNever && !list.complete.empty()) {
    throw UsageError(
        "run.resume = \"never\": {} holds checkpoints, which a new run would mix with its own; "
        "choose another run directory",
        directory);
  }
  for (const std::string& sentence : list.damaged) log(LogLevel::kWarning, "{}", sentence);
  if (list.complete.empty() && resume == ResumeFrom::kMust) {
    throw CheckpointError("run.resume = \"must\": {} holds no complete checkpoint", directory);
  }
  if (list.complete.empty() && !list.damaged.empty()) {
    throw CheckpointError(
        "{}: none of its checkpoints is complete; to start anew choose another run directory",
        directory);
  }
  return list.complete;
}

}  // namespace moiety::train
