// Every error of Moiety is a `moiety::Error`: a kind, and a text that names the operation, the
// argument and its value: MOIETY_CHECK(k % 16 == 0, "grouped_gemm: K={} must be ...", k). The
// program turns kinds into exit codes; the library knows none.
#pragma once

#include <stdexcept>
#include <string>

#include "moiety/base/format.h"

namespace moiety {

enum class ErrorKind {
  kInvalidArgument,  // the caller's values
  kUnsupported,      // legal, but not in this build or on this device
  kCuda,             // a GPU call failed, or there is no GPU of use
  kComm,             // a peer is late, gone, or does something else
  kIo,               // files and disks
  kOutOfMemory,      // the text names what and how many bytes
  kUsage,            // options or configuration of a user
  kData,             // training data, or another input file, that is damaged or does not fit
  kCheckpoint,       // a checkpoint that is unreadable or does not fit what is asked of it
  kNumerical,        // values that are not finite ended a run
};

const char* name(ErrorKind kind);

// Thrown as the ErrorOf of its kind alone, so that a handler may name either.
class Error : public std::runtime_error {
 public:
  ErrorKind kind() const { return kind_; }

 protected:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}

 private:
  ErrorKind kind_;
};

// An error of one kind: throw DataError("{}: no documents", path), and catch (const DataError&).
template <ErrorKind kKind>
class ErrorOf : public Error {
 public:
  explicit ErrorOf(std::string_view what) : Error(kKind, std::string(what)) {}
  template <class First, class... Args>
  ErrorOf(std::string_view format, const First& first, const Args&... args)
      : Error(kKind, text(format, first, args...)) {}
};
using UsageError = ErrorOf<ErrorKind::kUsage>;
using DataError = ErrorOf<ErrorKind::kData>;
using IoError = ErrorOf<ErrorKind::kIo>;
using CheckpointError = ErrorOf<ErrorKind::kCheckpoint>;
using NumericalError = ErrorOf<ErrorKind::kNumerical>;
using MemoryError = ErrorOf<ErrorKind::kOutOfMemory>;
using DeviceError = ErrorOf<ErrorKind::kCuda>;

// Throws the ErrorOf of this kind.
[[noreturn]] void throw_error(ErrorKind kind, const std::string& what);

template <class... Args>
[[noreturn]] void fail(ErrorKind kind, std::string_view format, const Args&... args) {
  throw_error(kind, text(format, args...));
}

}  // namespace moiety

// Throws Error(InvalidArgument) with the formatted text unless `cond` holds.
#define MOIETY_CHECK(cond, ...)                                           \
  do {                                                                    \
    if (!(cond)) [[unlikely]]                                             \
      ::moiety::fail(::moiety::ErrorKind::kInvalidArgument, __VA_ARGS__); \
  } while (false)
