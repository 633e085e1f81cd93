// The directory of a run: the lock, the configuration, log.txt, metrics.jsonl, tb/, plots/,
// profile/, checkpoints/.
#pragma once

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/moiety/config/options.h"
#include "moiety/data/tokenizer.h"

namespace moiety::app {

// A file that grows by whole records, each written at once. A record that cannot be written leaves
// nothing behind; it is counted, and the first one is a warning: a full disk does not stop
// training.
class RecordFile {
 public:
  // Throws IoError if the file cannot be opened.
  explicit RecordFile(const std::filesystem::path& path);
  ~RecordFile();
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;

  void add(std::string_view record);
  // Removes what stands behind the last end of a line: the machine stopped while it was written.
  void cut_last_line();

 private:
  std::string path_;
  int fd_;
  int64_t lost_ = 0;
  std::mutex mutex_;
};

// A RecordFile of lines. A last line that was cut off is removed.
class LineFile {
 public:
  explicit LineFile(const std::filesystem::path& path);
  void add(std::string_view line) { file_.add(std::string(line) + "\n"); }

 private:
  RecordFile file_;
};

// The kernel's lock on DIR/lock, which ends with the process, so it is never stale.
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
  // Creates the directory if it is missing, and takes the lock.
  explicit RunDirectory(const std::filesystem::path& path);
  // Removes what it created, if no run has begun there: after a dry run, or a start that failed.
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path checkpoints() const { return path_ / "checkpoints"; }

  // Writes config.toml or, if the newest of config.toml, config.2.toml, ... has other values, the
  // next of them.
  // Beside it the tokenizer's files, if there are any.
  void write_config(const Config& config);
  // The files that write_config writes into tokenizer/.
  void keep_tokenizer(std::span<const data::TokenizerFile> files);

  LineFile& log() { return log_; }
  LineFile& metrics() { return metrics_; }

 private:
  void write_tokenizer();

  std::filesystem::path path_;
  std::vector<std::filesystem::path> made_;  // directories that were not there, deepest first
  DirectoryLock lock_;
  LineFile log_, metrics_;
  std::vector<data::TokenizerFile> tokenizer_;
};

// The folder in which a run directory keeps its tokenizer.
std::string kept_tokenizer_folder(const std::string& run);

}  // namespace moiety::app
