// Errors of the library. A check that fails throws `moiety::Error` whose text names the operation,
// the argument and its value: MOIETY_CHECK(k % 16 == 0, "grouped_gemm: K={} must be ...", k).
#pragma once

#include <stdexcept>
#include <string>

#include "moiety/base/format.h"

namespace moiety {

enum class ErrorKind {
  kInvalidArgument,  // the caller's values
  kUnsupported,      // legal, but not in this build or on this device
  kCuda,             // a GPU call failed
  kComm,             // a peer is late, gone, or does something else
  kIo,               // files and disks
  kOutOfMemory,      // the text names what and how many bytes
};

const char* name(ErrorKind kind);

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

template <class... Args>
[[noreturn]] void fail(ErrorKind kind, std::string_view format, const Args&... args) {
  throw Error(kind, text(format, args...));
}

}  // namespace moiety

// Throws Error(InvalidArgument) with the formatted text unless `cond` holds.
#define MOIETY_CHECK(cond, ...)                                           \
  do {                                                                    \
    if (!(cond)) [[unlikely]]                                             \
      ::moiety::fail(::moiety::ErrorKind::kInvalidArgument, __VA_ARGS__); \
  } while (false)
