// The directory of a run: the lock, the configuration, log.txt, metrics.jsonl, checkpoints/.
#pragma once

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>
#include <string_view>

#include "apps/moiety/options.h"

namespace moiety::app {

// A file that grows by whole lines, each one `write`. A line that cannot be written is counted and
// the first one is warned of: a full disk does not stop training.
class LineFile {
 public:
  // Throws DiskError if the file cannot be opened.
  explicit LineFile(const std::filesystem::path& path);
  ~LineFile();
  LineFile(const LineFile&) = delete;
  LineFile& operator=(const LineFile&) = delete;

  void add(std::string_view line);

 private:
  std::string path_;
  int fd_;
  int64_t lost_ = 0;
  std::mutex mutex_;
};

// The kernel's lock on DIR/lock: it ends with the process, so it is never stale.
class DirectoryLock {
 public:
  // Throws UsageError if another process holds it, naming that process.
  explicit DirectoryLock(const std::filesystem::path& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int fd_;
};

class RunDirectory {
 public:
  // Creates the directory where it is missing and takes the lock.
  explicit RunDirectory(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path checkpoints() const { return path_ / "checkpoints"; }

  // Writes config.toml, or, where the newest of config.toml, config.2.toml, ... has other values,
  // the next of them.
  void write_config(const Config& config);

  LineFile& log() { return log_; }
  LineFile& metrics() { return metrics_; }

 private:
  std::filesystem::path path_;
  DirectoryLock lock_;
  LineFile log_, metrics_;
};

}  // namespace moiety::app
