#include "moiety/train/checkpoints.h"

#include <filesystem>
#include <fstream>

#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/checkpoint/retention.h"
#include "moiety/hf/folder.h"
#include "moiety/model/parameters.h"

namespace moiety::train {
namespace fs = std::filesystem;
namespace {

using checkpoint::Branch, checkpoint::BranchList;

std::string absolute(const std::string& path) {
  std::error_code error;
  fs::path whole = fs::weakly_canonical(path, error);
  if (error) whole = fs::absolute(path).lexically_normal();
  return (whole.has_filename() ? whole : whole.parent_path()).string();
}

BranchList branches_of(const std::string& directory) {
  return fs::is_directory(directory) ? checkpoint::read_branches(directory) : BranchList{};
}

// Whether run.resume is the path of this run itself, whose newest checkpoint it then means.
bool names_this_run(const TrainConfig& config) {
  const std::string given = absolute(config.run.checkpoint);
  return given == absolute(config.run.dir) || given == absolute(config.checkpoints());
}

// Whether this branch began with the same command: at the checkpoint that run.resume names, which
// may be pruned by now, with the same settings. A path under which there is another checkpoint by
// now names that one.
bool began_so(const TrainConfig& config, const Branch& branch) {
  if (branch.id.empty() || branch.variant != config.run.variant) return false;
  const fs::path given = config.run.checkpoint;
  if (!fs::exists(given / "COMMIT")) return absolute(given.string()) == branch.given;
  return checkpoint::read_manifest(given.string()).id == branch.id;
}

int64_t step_of(const std::string& path) {
  return checkpoint::step_of(fs::path(path).filename().string()).value_or(0);
}

// The checkpoints of the branch that began at run.resume, newest first, down to that one.
std::vector<std::string> of_branch(const Branch& branch, const std::vector<std::string>& complete) {
  std::vector<std::string> out;
  for (const std::string& path : complete) {
    if (step_of(path) >= branch.step) out.push_back(path);
  }
  const bool has_start = !out.empty() && step_of(out.back()) == branch.step;
  if (!has_start && fs::exists(branch.path)) out.push_back(branch.path);
  return out;
}

// The checkpoint that a file such as checkpoints/best names.
std::string named_by(const fs::path& file) {
  std::ifstream in(file);
  std::string name;
  std::getline(in, name);
  const fs::path path = file.parent_path() / name;
  if (!checkpoint::step_of(name) || !fs::exists(path / "COMMIT")) {
    throw CheckpointError("{}: names no checkpoint beside it", file.string());
  }
  return path.string();
}

// The checkpoint that run.resume names.
std::string given_checkpoint(const TrainConfig& config) {
  try {
    return find_checkpoint(config.run.checkpoint);
  } catch (const CheckpointError& e) {
    throw CheckpointError("run.resume (auto, never, must or a checkpoint): {}", e.what());
  }
}

}  // namespace

std::string find_checkpoint(const std::string& path) {
  const auto type_of = [](const fs::path& p) {
    std::error_code error;
    const fs::file_type type = fs::status(p, error).type();
    if (type == fs::file_type::none) throw IoError("{}: {}", p.string(), error.message());
    return type;
  };
  const fs::file_type type = type_of(path);
  if (type == fs::file_type::not_found) throw CheckpointError("{}: no such directory", path);
  if (type == fs::file_type::regular) return named_by(path);
  if (type != fs::file_type::directory) throw CheckpointError("{}: is not a directory", path);
  if (type_of(fs::path(path) / "COMMIT") != fs::file_type::not_found) return path;
  const fs::path inner = fs::path(path) / "checkpoints";
  const std::string directory = type_of(inner) == fs::file_type::directory ? inner.string() : path;
  const auto newest = checkpoint::find_newest_complete(directory);
  if (!newest && hf::is_folder(path)) {
    throw CheckpointError("{}: a Hugging Face folder, which `moiety import` makes a checkpoint of",
                          path);
  }
  if (!newest) throw CheckpointError("{}: holds no complete checkpoint", path);
  return *newest;
}

std::vector<checkpoint::ExpertModule> expert_modules(const model::Config& config,
                                                     const checkpoint::Manifest& manifest) {
  const auto rows_of = [&](const std::string& module) {
    for (const char* leaf : {".weight", ".weight0"}) {
      const auto at = manifest.tensors.find(module + leaf);
      if (at != manifest.tensors.end() && at->second.shape.size() >= 2) {
        return at->second.shape[at->second.shape.size() - 2];
      }
    }
    return int64_t{0};
  };
  std::vector<checkpoint::ExpertModule> modules;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    if (!config.is_moe(layer)) continue;
    const std::string prefix = model::layer_prefix(layer) + "moe.experts.";
    const bool gated = rows_of(prefix + "fc1") == 2 * config.d_ffn;
    modules.push_back({prefix + "fc1", config.router.experts, gated});
    modules.push_back({prefix + "fc2", config.router.experts, false});
  }
  return modules;
}

std::vector<std::string> resume_candidates(const TrainConfig& config) {
  const std::string directory = config.checkpoints();
  std::error_code none;
  const bool exists = fs::is_directory(directory, none);
  if (exists) checkpoint::recover(directory);
  ResumeFrom resume = config.run.resume;
  checkpoint::CheckpointList list;
  if (exists) list = checkpoint::list_checkpoints(directory);
  const BranchList branches = branches_of(directory);
  if (resume == ResumeFrom::kPath) {
    if (!names_this_run(config)) {
      if (!began_so(config, branches.now())) return {given_checkpoint(config)};
      const std::vector<std::string> found = of_branch(branches.now(), list.complete);
      if (found.empty()) return {given_checkpoint(config)};
      if (step_of(found[0]) > branches.now().step) {
        log(LogLevel::kInfo, "branch {}, which began at run.resume = {}, has gone on since",
            branches.current, config.run.checkpoint);
      }
      return found;
    }
    resume = ResumeFrom::kMust;
  }
  if (resume == ResumeFrom::kNever && !list.complete.empty()) {
    throw UsageError(
        "run.resume = \"never\": {} holds checkpoints, which a new run would mix with its own; "
        "choose another run directory",
        directory);
  }
  for (const std::string& sentence : list.damaged) log(LogLevel::kWarning, "{}", sentence);
  if (list.complete.empty() && list.damaged.empty() && !branches.now().path.empty() &&
      resume != ResumeFrom::kNever) {
    return {find_checkpoint(branches.now().path)};  // none was saved since the branch began
  }
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

Following follow_start(const TrainConfig& config, const std::string& loaded) {
  const std::string directory = config.checkpoints();
  const BranchList branches = branches_of(directory);
  Branch start;
  if (!loaded.empty()) {
    const bool named = config.run.resume == ResumeFrom::kPath && !names_this_run(config);
    if (!named || began_so(config, branches.now())) return {branches.now(), {}};
    const checkpoint::Manifest manifest = checkpoint::read_manifest(loaded);
    start.step = manifest.run.step;
    start.id = manifest.id;
    start.path = absolute(loaded);
    start.given = absolute(config.run.checkpoint);
    start.variant = config.run.variant;
  } else if (branches.current == 1) {
    return {branches.now(), {}};
  }
  const Branch begun = checkpoint::begin_branch(directory, start);
  if (begun.number == 1) return {begun, {}};
  std::string sentence = text("branch {} begins behind step {}", begun.number, begun.step);
  if (begun.parent != 0) sentence += text(" of branch {}", begun.parent);
  return {begun, sentence + text("; checkpoints of other branches are in {}/branch-*", directory)};
}

}  // namespace moiety::train
