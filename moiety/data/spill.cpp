#include "moiety/data/spill.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

#include "moiety/base/crc32c.h"
#include "moiety/base/error.h"

namespace moiety::data {
namespace {

constexpr size_t kBufferBytes = 1 << 20;

}  // namespace

Spill::~Spill() {
  if (fd_ >= 0) ::close(fd_);
}

void Spill::append(const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  buffer_.insert(buffer_.end(), p, p + bytes);
  if (buffer_.size() >= kBufferBytes) flush();
}

uint32_t Spill::crc32c() const {
  return moiety::crc32c(buffer_.data(), buffer_.size(), file_crc32c_);
}

void Spill::flush() {
  if (fd_ < 0) {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd_ < 0) throw IoError("{}: cannot create: {}", path_, std::strerror(errno));
    ::unlink(path_.c_str());
  }
  for (size_t done = 0; done < buffer_.size();) {
    const ssize_t n = ::write(fd_, buffer_.data() + done, buffer_.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw IoError("{}: cannot write: {}", path_, std::strerror(errno));
    done += static_cast<size_t>(n);
  }
  in_file_ += buffer_.size();
  file_crc32c_ = crc32c();
  buffer_.clear();
}

void Spill::read(const std::function<void(const void*, size_t)>& take) {
  std::vector<unsigned char> part(std::min<uint64_t>(in_file_, kBufferBytes));
  for (uint64_t at = 0; at < in_file_;) {
    const ssize_t n = ::pread(fd_, part.data(), std::min<uint64_t>(part.size(), in_file_ - at),
                              static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw IoError("{}: cannot read: {}", path_, std::strerror(errno));
    if (n == 0) throw IoError("{}: ends after {} of {} bytes", path_, at, in_file_);
    take(part.data(), static_cast<size_t>(n));
    at += static_cast<uint64_t>(n);
  }
  take(buffer_.data(), buffer_.size());
}

}  // namespace moiety::data
