#include "apps/moiety/input_file.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace moiety::app {

InputFile::InputFile(std::string path, ErrorKind kind) : path_(std::move(path)), kind_(kind) {
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat info {};
  if (fd_ < 0 || ::fstat(fd_, &info) != 0) {
    const int error = errno;
    if (fd_ >= 0) ::close(fd_);
    fail(kind_, "{}: cannot open: {}", path_, std::strerror(error));
  }
  if (!S_ISREG(info.st_mode)) {
    ::close(fd_);
    fail(kind_, "{}: {}", path_,
         S_ISDIR(info.st_mode) ? "is a directory, not a file" : "is not a regular file");
  }
  bytes_ = info.st_size;
}

InputFile::~InputFile() { ::close(fd_); }

void InputFile::read(int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t n = ::pread(fd_, out.data(), out.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      fail(kind_, "{}: cannot be read at byte {}: {}", path_, offset,
           n < 0 ? std::strerror(errno) : "it became shorter");
    }
    offset += n;
    out = out.subspan(static_cast<size_t>(n));
  }
}

std::string read_file(const std::string& path, int64_t most, ErrorKind kind) {
  const InputFile file(path, kind);
  if (file.bytes() > most) {
    fail(kind, "{}: has {}, at most {} are read", path, bytes_text(file.bytes()), bytes_text(most));
  }
  std::string out(static_cast<size_t>(file.bytes()), '\0');
  file.read(0, std::as_writable_bytes(std::span(out)));
  return out;
}

}  // namespace moiety::app
