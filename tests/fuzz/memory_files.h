// A directory of files in memory, read-only, for readers that take a FileSystem.
#pragma once

#include <map>
#include <string>

#include "moiety/checkpoint/file_system.h"

namespace moiety::fuzz {

class MemoryFiles : public checkpoint::FileSystem {
 public:
  // Files by path, "<directory>/<name>".
  explicit MemoryFiles(std::map<std::string, std::string_view> files);

  int open(const std::string& path, int flags) override;
  int close(int fd) override;
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override;
  int size(const std::string& path, uint64_t& bytes) override;
  int list(const std::string& path, std::vector<std::string>& names) override;

  ssize_t pwrite(int, const void*, size_t, off_t) override;
  int fallocate(int, off_t) override;
  int fdatasync(int) override;
  int fsync(int) override;
  int mkdir(const std::string&) override;
  int rename(const std::string&, const std::string&) override;
  int unlink(const std::string&) override;
  int rmdir(const std::string&) override;

 private:
  std::map<std::string, std::string_view> files_;
};

}  // namespace moiety::fuzz
