#include "tests/fuzz/memory_files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

namespace moiety::fuzz {

MemoryFiles::MemoryFiles(std::map<std::string, std::string_view> files)
    : files_(std::move(files)) {}

// A descriptor is the number of the file.
int MemoryFiles::open(const std::string& path, int) {
  const auto at = files_.find(path);
  return at == files_.end() ? -ENOENT : static_cast<int>(std::distance(files_.begin(), at));
}
int MemoryFiles::close(int) { return 0; }

ssize_t MemoryFiles::pread(int fd, void* data, size_t bytes, off_t offset) {
  const std::string_view file = std::next(files_.begin(), fd)->second;
  if (offset < 0) return -EINVAL;
  if (static_cast<size_t>(offset) >= file.size()) return 0;
  const std::string_view part = file.substr(static_cast<size_t>(offset), bytes);
  std::memcpy(data, part.data(), part.size());
  return static_cast<ssize_t>(part.size());
}

int MemoryFiles::size(const std::string& path, uint64_t& bytes) {
  const auto at = files_.find(path);
  if (at == files_.end()) return -ENOENT;
  bytes = at->second.size();
  return 0;
}

int MemoryFiles::list(const std::string& path, std::vector<std::string>& names) {
  for (const auto& [file, bytes] : files_) {
    if (file.starts_with(path + "/")) names.push_back(file.substr(path.size() + 1));
  }
  return 0;
}

ssize_t MemoryFiles::pwrite(int, const void*, size_t, off_t) { return -EROFS; }
int MemoryFiles::fallocate(int, off_t) { return -EROFS; }
int MemoryFiles::fdatasync(int) { return -EROFS; }
int MemoryFiles::fsync(int) { return -EROFS; }
int MemoryFiles::mkdir(const std::string&) { return -EROFS; }
int MemoryFiles::rename(const std::string&, const std::string&) { return -EROFS; }
int MemoryFiles::unlink(const std::string&) { return -EROFS; }
int MemoryFiles::rmdir(const std::string&) { return -EROFS; }

}  // namespace moiety::fuzz
