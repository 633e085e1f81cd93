// The exit codes of the program (docs/reliability.md#exit-codes). Only this file knows them: errors
// are those of the library, whose kinds are turned into codes here.
#pragma once

#include <string>
#include <string_view>

#include "moiety/base/error.h"

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

ExitCode exit_code(ErrorKind kind);

struct Failure {
  ErrorKind kind = ErrorKind::kInvalidArgument;
  std::string text;

  ExitCode code() const { return exit_code(kind); }
};
// The exception that is being handled. One of std::filesystem is a failure of the disk; any other
// that is no moiety::Error is an internal failure.
Failure current_failure();

// A failure on its way to the other ranks, which get only texts: "... (exit code 3)", and the way
// back. A text without the ending is a failure of communication.
std::string to_peers(const Failure& failure);
Failure from_peers(std::string_view text);

// Prints the last line on stderr.
void print_failure(const Failure& failure);

}  // namespace moiety::app
