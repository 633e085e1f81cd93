// Errors of the program: a sentence for the user and the exit code (spec trainer, 1) that goes with
// it. Errors of the library (moiety::Error) are mapped to codes in one place, current_failure.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "moiety/base/format.h"

namespace moiety::app {

enum ExitCode : int {
  kExitDone = 0,
  kExitInternal = 1,
  kExitUsage = 2,
  kExitData = 3,
  kExitDisk = 4,
  kExitCheckpoint = 5,
  kExitNumerical = 6,
  kExitComm = 7,
  kExitMemory = 8,
  kExitDevice = 9,
  kExitStartAgain = 75,
  kExitInterrupted = 130,
};

struct ExitError : std::runtime_error {
  ExitError(ExitCode exit_code, const std::string& what)
      : std::runtime_error(what), code(exit_code) {}
  ExitCode code;
};

// One class per code that the program throws itself: throw DataError("{}: no documents", path).
template <ExitCode kCode>
struct ErrorOf : ExitError {
  template <class... Args>
  explicit ErrorOf(std::string_view format, const Args&... args)
      : ExitError(kCode, text(format, args...)) {}
};
using UsageError = ErrorOf<kExitUsage>;
using DataError = ErrorOf<kExitData>;
using DiskError = ErrorOf<kExitDisk>;
using CheckpointError = ErrorOf<kExitCheckpoint>;
using NumericalError = ErrorOf<kExitNumerical>;
using MemoryError = ErrorOf<kExitMemory>;
using DeviceError = ErrorOf<kExitDevice>;

struct Failure {
  ExitCode code = kExitInternal;
  std::string text;
};
// The exception that is being handled.
Failure current_failure();

// A failure on its way to the other ranks, which get texts alone: "... (exit code 3)", and back. A
// text without the ending is one of communication.
std::string to_peers(const Failure& failure);
Failure from_peers(std::string_view text);

// The last line on stderr.
void print_failure(const Failure& failure);

}  // namespace moiety::app
