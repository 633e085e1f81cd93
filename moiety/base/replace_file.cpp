#include "moiety/base/replace_file.h"

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <unistd.h>

#include "moiety/base/error.h"

namespace moiety {

void replace_file(const std::filesystem::path& path, std::string_view bytes,
                  std::string_view more) {
  static std::atomic<int> calls{0};  // threads may write the same file
  const std::string temporary = text("{}.{}-{}.tmp", path.string(), ::getpid(), calls++);
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) throw IoError("{}: cannot open: {}", temporary, std::strerror(errno));
  int error = 0;
  for (std::string_view part : {bytes, more}) {
    while (!part.empty() && error == 0) {
      const ssize_t written = ::write(fd, part.data(), part.size());
      if (written > 0) part.remove_prefix(size_t(written));
      if (written <= 0 && errno != EINTR) error = written < 0 ? errno : ENOSPC;
    }
  }
  if (::close(fd) != 0 && error == 0) error = errno;
  if (error == 0 && ::rename(temporary.c_str(), path.c_str()) == 0) return;
  if (error == 0) error = errno;
  ::unlink(temporary.c_str());
  throw IoError("{}: cannot be written: {}", path.string(), std::strerror(error));
}

}  // namespace moiety
