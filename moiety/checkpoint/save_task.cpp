#include "moiety/checkpoint/save_task.h"

#include <algorithm>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "moiety/base/deadline.h"
#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/checkpoint/retention.h"
#include "moiety/checkpoint/together.h"

namespace moiety::checkpoint {
namespace {

void log_failure(const char* what, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    log(LogLevel::kWarning, "checkpoint: {}: {}", what, e.what());
  }
}

// Waits for the files of other ranks: it looks every millisecond at first, then less often, since a
// look may be a message to a file server.
class Watch {
 public:
  Watch(Seconds limit, const std::atomic<bool>& stop) : deadline_(limit), stop_(stop) {}
  // Pauses once. When stopped, or at the deadline, throws with `what`, the thing that is waited
  // for.
  void pause(const std::function<std::string()>& what) {
    if (stop_) fail(ErrorKind::kIo, "save: given up, the run has ended; {}", what());
    if (deadline_.expired()) {
      fail(ErrorKind::kIo, "save: after {} s {}", deadline_.limit().count(), what());
    }
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(pause_ * 1.25, Seconds(0.1));
  }

 private:
  Deadline deadline_;
  const std::atomic<bool>& stop_;
  Seconds pause_{0.001};
};

}  // namespace

SaveTask::SaveTask(RankFile file, Manifest head, int rank, std::string directory,
                   const SaveOptions& options, FileSystem& files)
    : file_(std::move(file)),
      head_(std::move(head)),
      rank_(rank),
      directory_(std::move(directory)),
      temporary_(temporary_path(directory_, head_)),
      path_(directory_ + "/" + step_name(head_.run.step)),
      options_(options),
      files_(files) {}

std::string SaveTask::temporary_path(const std::string& directory, const Manifest& head) {
  return text("{}/.tmp-{}-{}", directory, step_name(head.run.step), head.id);
}

std::string SaveTask::done_path(int rank) const {
  return text("{}/rank-{}.done", temporary_, rank);
}

uint64_t SaveTask::run() { return rank_ == 0 ? lead() : follow(); }

uint64_t SaveTask::lead() {
  Manifest manifest = head_;
  try {
    merge(manifest, file_.write(temporary_, options_.verify, files_, stop_));
    collect(manifest);
    commit(manifest);
  } catch (...) {
    discard();
    throw;
  }
  tidy();
  uint64_t bytes = 0;
  for (const FileEntry& file : manifest.files) bytes += file.bytes;
  return bytes;
}

uint64_t SaveTask::follow() {
  std::string done;
  const std::string error = report_of([&] {
    done = encode_manifest(file_.write(temporary_, options_.verify, files_, stop_));
    announce(done);
  });
  if (!error.empty()) {
    log_failure("telling rank 0 of a failure", [&] {
      if (!size_of(files_, temporary_)) return;  // rank 0 knows already
      // A full disk has room for the words once the file is gone.
      log_failure("removing a failed file",
                  [&] { remove(files_, temporary_ + "/" + file_.name()); });
      announce(error);
    });
  }
  try {
    await_verdict();
  } catch (const Error&) {
    if (error.empty()) throw;
    throw_report(error);
  }
  return file_.bytes();
}

void SaveTask::announce(const std::string& done) const {
  const std::string path = done_path(rank_), part = path + ".part";
  // A failure must get through, if need be without words.
  const std::string error = report_of([&] { write_text(files_, part, done); });
  if (!error.empty() && done.starts_with('{')) throw_report(error);
  rename(files_, part, path);
}

void SaveTask::collect(Manifest& manifest) const {
  const int ranks = head_.run.layout.ranks;
  std::vector<Manifest> parts(static_cast<size_t>(ranks));
  std::vector<int> missing;
  for (int rank = 1; rank < ranks; ++rank) missing.push_back(rank);
  Watch watch(options_.deadline, stop_);
  while (!missing.empty()) {
    const std::vector<std::string> names = list(files_, temporary_);
    std::erase_if(missing, [&](int rank) {
      if (!std::ranges::binary_search(names, text("rank-{}.done", rank))) return false;
      const std::string done = read_text(files_, done_path(rank), kLongestManifest);
      const std::string prefix = text("rank {}: ", rank);
      if (done.empty()) fail(ErrorKind::kIo, "{}failed to write, and to write why", prefix);
      if (!done.starts_with('{')) throw_report(done, prefix);
      parts[rank] = parse_manifest(done, done_path(rank));
      return true;
    });
    if (missing.empty()) break;
    watch.pause([&] {
      return text("{} of {} ranks have not written their files, first rank {}", missing.size(),
                  ranks, missing[0]);
    });
  }
  for (int rank = 1; rank < ranks; ++rank) merge(manifest, parts[rank]);
}

void SaveTask::commit(const Manifest& manifest) const {
  check_tiling(manifest);
  const std::string json = encode_manifest(manifest);
  for (const data::TokenizerFile& f : options_.tokenizer) {
    write_text(files_, temporary_ + "/" + f.name, f.bytes);
  }
  write_text(files_, temporary_ + "/manifest.json", json);
  write_text(files_, temporary_ + "/COMMIT", encode_commit(manifest, json));
  for (int rank = 1; rank < head_.run.layout.ranks; ++rank) remove(files_, done_path(rank));
  sync_directory(files_, temporary_);

  const bool replaces = size_of(files_, path_).has_value();
  if (replaces) rename(files_, path_, old_path());
  try {
    rename(files_, temporary_, path_);
  } catch (const Error&) {
    if (replaces) {
      log_failure("putting the old one back", [&] { rename(files_, old_path(), path_); });
    }
    throw;
  }
  sync_directory(files_, directory_);
}

void SaveTask::tidy() const {
  log_failure("writing `latest`", [&] {
    const std::string latest = directory_ + "/.tmp-latest";
    write_text(files_, latest, step_name(head_.run.step) + "\n");
    rename(files_, latest, directory_ + "/latest");
  });
  log_failure("removing the old one", [&] { remove(files_, old_path()); });
  log_failure("pruning", [&] { prune(directory_, options_.keep, head_.run.step, files_); });
  if (options_.keep.best == 0) return;
  log_failure("writing `best`", [&] { update_best(directory_, files_); });
}

void SaveTask::discard() const {
  log_failure("clearing a failed save", [&] {
    if (!size_of(files_, temporary_)) return;
    // The directory is renamed first: other ranks see it at once and add nothing more.
    const std::string trash = directory_ + "/.trash-" + head_.id;
    rename(files_, temporary_, trash);
    remove(files_, trash);
  });
}

void SaveTask::await_verdict() const {
  Watch watch(options_.deadline, stop_);
  while (size_of(files_, temporary_)) {
    watch.pause([&] { return text("rank 0 has not completed {}", path_); });
  }
  std::string commit;
  if (size_of(files_, path_)) commit = read_text(files_, path_ + "/COMMIT", 4096);
  if (commit.find(head_.id) == std::string::npos) {
    fail(ErrorKind::kIo, "save: rank 0 gave {} up", path_);
  }
}

}  // namespace moiety::checkpoint
