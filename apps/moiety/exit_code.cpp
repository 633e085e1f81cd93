#include "apps/moiety/exit_code.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <new>

#include "moiety/base/printable.h"

namespace moiety::app {
namespace {

constexpr std::string_view kEnding = " (exit code ";
constexpr size_t kLongestLine = 4096;

// The kind that stands for a code; several kinds may share one.
ErrorKind kind_of(int code) {
  for (ErrorKind kind :
       {ErrorKind::kUsage, ErrorKind::kData, ErrorKind::kIo, ErrorKind::kCheckpoint,
        ErrorKind::kNumerical, ErrorKind::kComm, ErrorKind::kOutOfMemory, ErrorKind::kCuda}) {
    if (exit_code(kind) == code) return kind;
  }
  return ErrorKind::kInvalidArgument;
}

}  // namespace

ExitCode exit_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUsage:
    case ErrorKind::kUnsupported:
      return kExitUsage;
    case ErrorKind::kData:
      return kExitData;
    case ErrorKind::kIo:
      return kExitDisk;
    case ErrorKind::kCheckpoint:
      return kExitCheckpoint;
    case ErrorKind::kNumerical:
      return kExitNumerical;
    case ErrorKind::kComm:
      return kExitComm;
    case ErrorKind::kOutOfMemory:
      return kExitMemory;
    case ErrorKind::kCuda:
      return kExitDevice;
    case ErrorKind::kInvalidArgument:
      return kExitInternal;  // what the user gives is checked before
  }
  return kExitInternal;
}

Failure current_failure() {
  try {
    throw;
  } catch (const Error& e) {
    return {e.kind(), e.what()};
  } catch (const std::filesystem::filesystem_error& e) {
    return {ErrorKind::kIo, text("{}: {}", e.path1().string(), e.code().message())};
  } catch (const std::bad_alloc&) {
    return {ErrorKind::kOutOfMemory, "out of memory"};
  } catch (const std::exception& e) {
    return {ErrorKind::kInvalidArgument, e.what()};
  } catch (...) {
    return {ErrorKind::kInvalidArgument, "an exception without a text"};
  }
}

std::string to_peers(const Failure& failure) {
  return failure.text + std::string(kEnding) + std::to_string(failure.code()) + ")";
}

Failure from_peers(std::string_view text) {
  const size_t ending = text.rfind(kEnding);
  if (ending == std::string_view::npos) return {ErrorKind::kComm, std::string(text)};
  const int code = std::atoi(std::string(text.substr(ending + kEnding.size())).c_str());
  return {kind_of(code), std::string(text.substr(0, ending))};
}

void print_failure(const Failure& failure) {
  // One line, whatever the names and values in it are.
  std::fprintf(stderr, "moiety: %s\n", printable(failure.text, kLongestLine).c_str());
}

}  // namespace moiety::app
