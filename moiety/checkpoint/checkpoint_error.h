// A checkpoint that cannot be read or does not fit what is asked of it (exit code 5 of the
// program). Disks that fail are Error(Io).
#pragma once

#include "moiety/base/error.h"

namespace moiety::checkpoint {

class CheckpointError : public Error {
 public:
  explicit CheckpointError(const std::string& what) : Error(ErrorKind::kIo, what) {}
};

template <class... Args>
[[noreturn]] void refuse(std::string_view format, const Args&... args) {
  throw CheckpointError(text(format, args...));
}

}  // namespace moiety::checkpoint
