#include "tests/checkpoint/faulty_files.h"

#include <cerrno>
#include <csignal>
#include <fcntl.h>
#include <filesystem>
#include <unistd.h>

namespace moiety::checkpoint {

FaultyFiles::~FaultyFiles() {
  for (const auto& [fd, second] : unsynced_) ::close(second);
  for (const int second : lost_files_) ::close(second);
}

int FaultyFiles::next(bool takes_space) {
  const int call = calls_++;
  if (n_ < 0 || call < n_) return 0;
  switch (fault_) {
    case Fault::kFail:
      return call == n_ ? -ENOSPC : 0;
    case Fault::kFull:
      return takes_space ? -ENOSPC : 0;
    case Fault::kSigkill:
      ::raise(SIGKILL);
      [[fallthrough]];
    default:
      return -EIO;
  }
}

void FaultyFiles::lose() {
  const std::lock_guard lock(mutex_);
  for (const auto& [fd, second] : unsynced_) lost_files_.push_back(second);
  unsynced_.clear();
  for (const int second : lost_files_) {
    if (::ftruncate(second, 0) != 0) throw std::runtime_error("ftruncate");
  }
  for (const std::string& path : created_) std::filesystem::remove_all(path);
  for (; !renamed_.empty(); renamed_.pop_back()) {
    const auto& [from, to] = renamed_.back();
    if (std::filesystem::exists(to)) std::filesystem::rename(to, from);
  }
}

void FaultyFiles::forget(const std::string& path) {
  std::erase(created_, path);
  std::erase_if(renamed_, [&](const auto& r) { return r.second == path; });
}

int FaultyFiles::open(const std::string& path, int flags) {
  if (const int error = next()) return error;
  const bool creates = (flags & O_CREAT) && !std::filesystem::exists(path);
  const int fd = posix().open(path, flags);
  const std::lock_guard lock(mutex_);
  if (fd >= 0) paths_[fd] = path;
  if (fd >= 0 && creates) created_.push_back(path);
  return fd;
}

int FaultyFiles::close(int fd) {
  const int error = next();
  {
    const std::lock_guard lock(mutex_);
    paths_.erase(fd);
    if (const auto at = unsynced_.find(fd); at != unsynced_.end()) {
      lost_files_.push_back(at->second);
      unsynced_.erase(at);
    }
  }
  const int closed = posix().close(fd);
  return error ? error : closed;
}

ssize_t FaultyFiles::pread(int fd, void* data, size_t bytes, off_t offset) {
  if (const int error = next()) return error;
  return posix().pread(fd, data, bytes, offset);
}

ssize_t FaultyFiles::pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  if (fault_ == Fault::kSigkill && calls_ == n_) posix().pwrite(fd, data, bytes / 2, offset);
  const bool was_dead = dead();
  const int error = next(true);
  if (!was_dead) {
    const std::lock_guard lock(mutex_);
    if (!unsynced_.contains(fd)) unsynced_[fd] = ::dup(fd);
    if (error) posix().pwrite(fd, data, bytes / 2, offset);
  }
  if (error) return error;
  // Short writes are legal.
  return posix().pwrite(fd, data, bytes > 1 ? bytes - bytes / 3 : bytes, offset);
}

int FaultyFiles::fallocate(int fd, off_t bytes) {
  if (const int error = next(true)) return error;
  return posix().fallocate(fd, bytes);
}

int FaultyFiles::fdatasync(int fd) {
  if (const int error = next()) return error;
  const std::lock_guard lock(mutex_);
  if (const auto at = unsynced_.find(fd); at != unsynced_.end()) {
    ::close(at->second);
    unsynced_.erase(at);
  }
  return 0;  // these files need not outlive the machine
}

int FaultyFiles::fsync(int fd) {
  if (const int error = FaultyFiles::fdatasync(fd)) return error;
  const std::lock_guard lock(mutex_);
  const std::string& directory = paths_[fd];
  const auto within = [&](const std::string& path) {
    return std::filesystem::weakly_canonical(path).parent_path() ==
           std::filesystem::weakly_canonical(directory);
  };
  std::erase_if(created_, within);
  std::erase_if(renamed_, [&](const auto& r) { return within(r.second); });
  return 0;
}

int FaultyFiles::mkdir(const std::string& path) {
  if (const int error = next()) return error;
  const int result = posix().mkdir(path);
  const std::lock_guard lock(mutex_);
  if (result == 0) created_.push_back(path);
  return result;
}

int FaultyFiles::rename(const std::string& from, const std::string& to) {
  if (const int error = next()) return error;
  const int result = posix().rename(from, to);
  if (result < 0) return result;
  const std::lock_guard lock(mutex_);
  for (std::string& path : created_) {
    if (path == from || path.starts_with(from + "/")) path.replace(0, from.size(), to);
  }
  renamed_.emplace_back(from, to);
  return 0;
}

int FaultyFiles::unlink(const std::string& path) {
  if (const int error = next()) return error;
  const int result = posix().unlink(path);
  const std::lock_guard lock(mutex_);
  if (result == 0) forget(path);
  return result;
}

int FaultyFiles::rmdir(const std::string& path) {
  if (const int error = next()) return error;
  const int result = posix().rmdir(path);
  const std::lock_guard lock(mutex_);
  if (result == 0) forget(path);
  return result;
}

int FaultyFiles::size(const std::string& path, uint64_t& bytes) {
  if (const int error = next()) return error;
  return posix().size(path, bytes);
}

int FaultyFiles::list(const std::string& path, std::vector<std::string>& names) {
  if (const int error = next()) return error;
  return posix().list(path, names);
}

}  // namespace moiety::checkpoint
