#include "apps/moiety/config/checkpoints.h"

#include <filesystem>

#include "apps/moiety/config/training_state.h"
#include "apps/moiety/exit_code.h"
#include "moiety/base/log.h"
#include "moiety/checkpoint/loader.h"
#include "moiety/checkpoint/retention.h"

namespace moiety::app {
namespace fs = std::filesystem;

std::string find_checkpoint(const std::string& path) {
  if (!fs::is_directory(path)) throw CheckpointError("{}: no such directory", path);
  if (fs::exists(fs::path(path) / "COMMIT")) return path;
  const fs::path inner = fs::path(path) / "checkpoints";
  const std::string directory = fs::is_directory(inner) ? inner.string() : path;
  const auto newest = checkpoint::find_newest_complete(directory);
  if (!newest) throw CheckpointError("{}: holds no complete checkpoint", path);
  return *newest;
}

std::vector<std::string> resume_candidates(const Options& options, const std::string& directory) {
  const std::string& resume = options.run.resume;
  if (resume != "auto" && resume != "must" && resume != "never") return {find_checkpoint(resume)};
  checkpoint::CheckpointList list;
  if (fs::is_directory(directory)) list = checkpoint::list_checkpoints(directory);
  if (resume == "never" && !list.complete.empty()) {
    throw UsageError(
        "run.resume = \"never\": {} holds checkpoints, which a new run would mix with its own; "
        "choose another run directory",
        directory);
  }
  for (const std::string& sentence : list.damaged) log(LogLevel::kWarning, "{}", sentence);
  if (list.complete.empty() && resume == "must") {
    throw CheckpointError("run.resume = \"must\": {} holds no complete checkpoint", directory);
  }
  if (list.complete.empty() && !list.damaged.empty()) {
    throw CheckpointError(
        "{}: none of its checkpoints is complete; to start anew choose another run directory",
        directory);
  }
  return list.complete;
}

CheckpointInfo read_checkpoint_info(const std::string& path) {
  const checkpoint::Manifest manifest = checkpoint::read_manifest(path);
  return {path, manifest.run.step, parse_config_json(manifest.run.config, path)};
}

checkpoint::RankLayout rank_layout(const Grid& grid) {
  return {.ranks = rank_count(grid),
          .tp = grid.tp,
          .gtp = grid.gtp,
          .dp = grid.dp,
          .ep = grid.ep,
          .egtp = grid.egtp};
}

checkpoint::RunState load_weights(const std::string& path, const optim::StateView& weights,
                                  RankModel& model) {
  optim::StateView view = model.router_biases();
  for (const optim::StatePiece& piece : weights) {
    if (piece.slot == "weight") view.push_back(piece);
  }
  checkpoint::LoadOptions options;
  options.weights_only = true;
  return checkpoint::load(path, view, options, model.world().bootstrap());
}

}  // namespace moiety::app
