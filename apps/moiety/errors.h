// Errors of the program: a sentence for the user and the exit code (spec trainer, 1) that goes with
// it. Errors of the library (moiety::Error) are mapped to codes in one place, main.
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

}  // namespace moiety::app
