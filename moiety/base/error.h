// The errors of Moiety. Every one is a `moiety::Error`: a kind, and a text that names the
// operation, the argument and its value: MOIETY_CHECK(k % 16 == 0, "grouped_gemm: K={} must be
// ...", k). The program turns kinds into exit codes; the library knows none.
#pragma once

#include <stdexcept>
#include <string>

#include "moiety/base/format.h"

namespace moiety {

enum class ErrorKind {
  kInvalidArgument,  // the caller's values
  kUnsupported,      // legal, but not in this build or on this device
  kCuda,             // a GPU call failed, or there is no usable GPU
  kComm,             // a peer is late, is gone, or does something else
  kIo,               // files and disks
  kOutOfMemory,      // memory is short; the text says for what, and how many bytes
  kUsage,            // a user's options or configuration
  kData,             // training data, or another input file, that is damaged or does not fit
  kCheckpoint,       // a checkpoint that is unreadable or does not fit what is asked of it
  kNumerical,        // a run ended because values were not finite
};

const char* name(ErrorKind kind);

// The common base. Only its ErrorOf classes are thrown, so a handler may name this or one kind.
class Error : public std::runtime_error {
 public:
  ErrorKind kind() const { return kind_; }

 protected:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}

 private:
  ErrorKind kind_;
};

// An error of one kind: throw DataError("{}: no documents", path), catch (const DataError&).
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

// Throws Error(kInvalidArgument) with the formatted text unless `cond` holds.
#define MOIETY_CHECK(cond, ...)                                           \
  do {                                                                    \
    if (!(cond)) [[unlikely]]                                             \
      ::moiety::fail(::moiety::ErrorKind::kInvalidArgument, __VA_ARGS__); \
  } while (false)
