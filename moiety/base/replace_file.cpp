#include "moiety/base/replace_file.h"

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

#include "moiety/base/error.h"

namespace moiety {
namespace {

namespace fs = std::filesystem;

// Writes the parts and closes the file; returns an errno, 0 for none.
int write_parts(int fd, std::string_view bytes, std::string_view more) {
  int error = 0;
  for (std::string_view part : {bytes, more}) {
    while (!part.empty() && error == 0) {
      const ssize_t written = ::write(fd, part.data(), part.size());
      if (written > 0) part.remove_prefix(size_t(written));
      if (written <= 0 && errno != EINTR) error = written < 0 ? errno : ENOSPC;
    }
  }
  if (::close(fd) != 0 && error == 0) error = errno;
  return error;
}

// Writes into a device or a FIFO. A FIFO that nobody reads is an error, not a wait.
int write_into(const std::string& path, std::string_view bytes, std::string_view more) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return errno;
  ::fcntl(fd, F_SETFL, 0);
  return write_parts(fd, bytes, more);
}

int replace(const std::string& path, std::string_view bytes, std::string_view more) {
  static std::atomic<int> calls{0};  // threads may write the same file
  const std::string temporary = text("{}.{}-{}.tmp", path, ::getpid(), calls++);
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return errno;
  int error = write_parts(fd, bytes, more);
  if (error == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) ::unlink(temporary.c_str());
  return error;
}

}  // namespace

void replace_file(const fs::path& path, std::string_view bytes, std::string_view more) {
  struct stat there {};
  int error = ::stat(path.c_str(), &there) == 0 ? 0 : errno;
  const bool special = error == 0 && !S_ISREG(there.st_mode);
  if (error == ENOENT) error = 0;
  if (error == 0) {
    // What a link names is replaced, not the link.
    std::error_code none;
    fs::path named = path;
    while (fs::is_symlink(named, none)) named = named.parent_path() / fs::read_symlink(named, none);
    error = special ? write_into(path, bytes, more) : replace(named.string(), bytes, more);
  }
  if (error != 0) throw IoError("{}: cannot be written: {}", path.string(), std::strerror(error));
}

}  // namespace moiety
