// The refusal of a checkpoint that cannot be read or does not fit what is asked of it. A disk that
// fails is an IoError instead.
#pragma once

#include "moiety/base/error.h"

namespace moiety::checkpoint {

template <class... Args>
[[noreturn]] void refuse(std::string_view format, const Args&... args) {
  fail(ErrorKind::kCheckpoint, format, args...);
}

}  // namespace moiety::checkpoint
