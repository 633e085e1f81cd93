// A file system whose n-th call goes wrong.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "moiety/checkpoint/file_system.h"

namespace moiety::checkpoint {

enum class Fault {
  kFail,       // the n-th call fails with "no space left", later ones work
  kKill,       // the n-th call and all later ones do nothing, as after a kill; a write is half done
  kPowerLoss,  // kKill, then what was not synchronized is lost: data, new names, renames
  kFull,       // from the n-th call on there is no space for another byte
  kSigkill,    // the n-th call kills the process; a write is half done
};

// Counts calls, whoever makes them; call number `n` (from 0) goes wrong. A negative n: none does.
class FaultyFiles : public FileSystem {
 public:
  FaultyFiles(Fault fault, int n) : fault_(fault), n_(n) {}
  ~FaultyFiles() override;
  int calls() const { return calls_; }
  // After a power loss: takes back what was not synchronized.
  void lose();

  int open(const std::string& path, int flags) override;
  int close(int fd) override;
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override;
  ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) override;
  int fallocate(int fd, off_t bytes) override;
  int fdatasync(int fd) override;
  int fsync(int fd) override;
  int mkdir(const std::string& path) override;
  int rename(const std::string& from, const std::string& to) override;
  int unlink(const std::string& path) override;
  int rmdir(const std::string& path) override;
  int size(const std::string& path, uint64_t& bytes) override;
  int list(const std::string& path, std::vector<std::string>& names) override;

 private:
  // 0, or the negative errno of a call that goes wrong.
  int next(bool takes_space = false);
  void forget(const std::string& path);
  bool dead() const {
    return (fault_ == Fault::kKill || fault_ == Fault::kPowerLoss) && n_ >= 0 && calls_ > n_;
  }

  Fault fault_;
  int n_;
  std::atomic<int> calls_ = 0;
  std::mutex mutex_;
  std::map<int, std::string> paths_;  // of open descriptors
  std::map<int, int> unsynced_;       // descriptors written to, and a second one for each
  std::vector<int> lost_files_;       // second descriptors of closed files
  // Files of directories that were not synchronized since; paths as they are now.
  std::vector<std::string> created_;
  std::vector<std::pair<std::string, std::string>> renamed_;
};

}  // namespace moiety::checkpoint
