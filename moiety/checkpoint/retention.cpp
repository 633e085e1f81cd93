#include "moiety/checkpoint/retention.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "moiety/base/log.h"
#include "moiety/checkpoint/branches.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/manifest.h"

namespace moiety::checkpoint {
namespace {

// The manifest of a complete checkpoint; empty if it is damaged. A disk that fails throws.
std::optional<Manifest> complete(FileSystem& files, const std::string& path) {
  try {
    return read_manifest(path, files);
  } catch (const CheckpointError&) {
    return std::nullopt;
  }
}

// The steps whose checkpoints have a validation loss, lowest first; of equal ones the newest.
std::vector<int64_t> best_first(FileSystem& files, const std::string& directory) {
  std::vector<std::pair<double, int64_t>> found;
  for (const int64_t step : steps_in(directory, files)) {
    const auto manifest = complete(files, directory + "/" + step_name(step));
    if (!manifest || !manifest->run.validation_loss) continue;
    found.emplace_back(*manifest->run.validation_loss, -step);
  }
  std::sort(found.begin(), found.end());
  std::vector<int64_t> steps;
  for (const auto& [loss, negative] : found) steps.push_back(-negative);
  return steps;
}

// Gives a checkpoint its name back, or removes it where the newer one of its step is complete.
void restore(FileSystem& files, const std::string& directory, const std::string& old) {
  const auto manifest = complete(files, old);
  if (manifest) {
    const std::string path = directory + "/" + step_name(manifest->run.step);
    if (!complete(files, path)) {
      remove(files, path);
      rename(files, old, path);
      log(LogLevel::kWarning, "checkpoint: {} is back after an interrupted save", path);
      return;
    }
  }
  remove(files, old);
}

}  // namespace

std::string step_name(int64_t step) { return text("step-{:08}", step); }

std::optional<int64_t> step_of(std::string_view name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  int64_t step = 0;
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
  if (step < 0 || step_name(step) != name) return std::nullopt;
  return step;
}

std::vector<int64_t> steps_in(const std::string& directory, FileSystem& files) {
  std::vector<int64_t> steps;
  for (const std::string& name : list(files, directory)) {
    if (const auto step = step_of(name)) steps.push_back(*step);
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

CheckpointList list_checkpoints(const std::string& directory, FileSystem& files) {
  CheckpointList found;
  for (const int64_t step : steps_in(directory, files)) {
    const std::string path = directory + "/" + step_name(step);
    try {
      const Manifest manifest = read_manifest(path, files);
      if (manifest.run.step != step) refuse("{} is that of step {}", path, manifest.run.step);
      found.complete.push_back(path);
    } catch (const Error& e) {
      if (e.kind() == ErrorKind::kIo) found.unreadable.push_back(e.what());
      found.damaged.push_back(e.what());
    }
  }
  return found;
}

std::optional<std::string> find_newest_complete(const std::string& directory, FileSystem& files) {
  const CheckpointList found = list_checkpoints(directory, files);
  // It may well be a good one: an older one in its place would be a wrong answer.
  if (!found.unreadable.empty()) throw IoError("{}", found.unreadable.front());
  for (const std::string& why : found.damaged) {
    log(LogLevel::kWarning, "checkpoint: skipped a damaged one: {}", why);
  }
  if (found.complete.empty()) return std::nullopt;
  return found.complete.front();
}

void recover(const std::string& directory, FileSystem& files) {
  finish_branching(directory, files);
  const std::vector<std::string> names = list(files, directory);
  for (const std::string& name : names) {
    if (name.starts_with(".old-")) restore(files, directory, directory + "/" + name);
  }
  for (const std::string& name : names) {
    if (name.starts_with(".tmp-") || name.starts_with(".trash-")) {
      remove(files, directory + "/" + name);
    }
  }
  if (!names.empty()) sync_directory(files, directory);
}

void prune(const std::string& directory, const Keep& keep, int64_t keep_step, FileSystem& files) {
  if (keep.last == 0) return;
  const std::vector<int64_t> best =
      keep.best > 0 ? best_first(files, directory) : std::vector<int64_t>{};
  const auto best_end = best.begin() + std::min<int64_t>(keep.best, std::ssize(best));
  std::vector<std::string> victims;
  int kept = 0;
  for (const int64_t step : steps_in(directory, files)) {
    const bool stays = step == keep_step || (keep.every > 0 && step % keep.every == 0) ||
                       std::find(best.begin(), best_end, step) != best_end;
    if (kept >= keep.last && stays) continue;
    const std::string path = directory + "/" + step_name(step);
    const auto manifest = complete(files, path);
    if (!manifest) continue;
    if (++kept <= keep.last) continue;
    victims.push_back(directory + "/.trash-" + manifest->id);
    rename(files, path, victims.back());
  }
  if (victims.empty()) return;
  sync_directory(files, directory);
  for (const std::string& victim : victims) remove(files, victim);
}

void update_best(const std::string& directory, FileSystem& files) {
  const std::vector<int64_t> best = best_first(files, directory);
  const std::string path = directory + "/best", temporary = directory + "/.tmp-best";
  if (best.empty()) return remove(files, path);
  write_text(files, temporary, step_name(best[0]) + "\n");
  rename(files, temporary, path);
}

}  // namespace moiety::checkpoint
