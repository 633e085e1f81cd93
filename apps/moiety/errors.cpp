#include "apps/moiety/errors.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>

#include "moiety/base/error.h"
#include "moiety/checkpoint/checkpoint_error.h"

namespace moiety::app {
namespace {

constexpr std::string_view kEnding = " (exit code ";

ExitCode exit_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUnsupported:
      return kExitUsage;
    case ErrorKind::kCuda:
      return kExitDevice;
    case ErrorKind::kComm:
      return kExitComm;
    case ErrorKind::kIo:
      return kExitDisk;
    case ErrorKind::kOutOfMemory:
      return kExitMemory;
    case ErrorKind::kInvalidArgument:
      return kExitInternal;  // what the user gives is checked before
  }
  return kExitInternal;
}

}  // namespace

Failure current_failure() {
  try {
    throw;
  } catch (const ExitError& e) {
    return {e.code, e.what()};
  } catch (const checkpoint::CheckpointError& e) {
    return {kExitCheckpoint, e.what()};
  } catch (const Error& e) {
    return {exit_code(e.kind()), e.what()};
  } catch (const std::bad_alloc&) {
    return {kExitMemory, "out of memory"};
  } catch (const std::exception& e) {
    return {kExitInternal, e.what()};
  } catch (...) {
    return {kExitInternal, "an exception without a text"};
  }
}

std::string to_peers(const Failure& failure) {
  return failure.text + std::string(kEnding) + std::to_string(failure.code) + ")";
}

Failure from_peers(std::string_view text) {
  const size_t ending = text.rfind(kEnding);
  if (ending == std::string_view::npos) return {kExitComm, std::string(text)};
  const int code = std::atoi(std::string(text.substr(ending + kEnding.size())).c_str());
  return {static_cast<ExitCode>(code), std::string(text.substr(0, ending))};
}

void print_failure(const Failure& failure) {
  std::fprintf(stderr, "moiety: %s\n", failure.text.c_str());
}

}  // namespace moiety::app
