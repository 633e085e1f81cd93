#include "tests/fuzz/targets.h"

#include <cstdio>
#include <stdexcept>
#include <sys/mman.h>
#include <unistd.h>

namespace moiety::fuzz {

void require(bool holds, const char* promise) {
  if (!holds) throw std::logic_error(promise);
}

MemoryFile::MemoryFile(std::string_view bytes) : fd_(::memfd_create("fuzz", MFD_CLOEXEC)) {
  require(fd_ >= 0, "memfd_create works");
  require(::write(fd_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
          "memory can be written");
  std::snprintf(path_, sizeof path_, "/proc/self/fd/%d", fd_);
}

MemoryFile::~MemoryFile() { ::close(fd_); }

}  // namespace moiety::fuzz
