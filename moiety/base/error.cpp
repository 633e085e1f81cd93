#include "moiety/base/error.h"

namespace moiety {

const char* name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return "invalid argument";
    case ErrorKind::kUnsupported:
      return "unsupported";
    case ErrorKind::kCuda:
      return "cuda";
    case ErrorKind::kComm:
      return "communication";
    case ErrorKind::kIo:
      return "io";
    case ErrorKind::kOutOfMemory:
      return "out of memory";
    case ErrorKind::kUsage:
      return "usage";
    case ErrorKind::kData:
      return "data";
    case ErrorKind::kCheckpoint:
      return "checkpoint";
    case ErrorKind::kNumerical:
      return "numerical";
  }
  return "error";
}

void throw_error(ErrorKind kind, const std::string& what) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      throw ErrorOf<ErrorKind::kInvalidArgument>(what);
    case ErrorKind::kUnsupported:
      throw ErrorOf<ErrorKind::kUnsupported>(what);
    case ErrorKind::kCuda:
      throw DeviceError(what);
    case ErrorKind::kComm:
      throw ErrorOf<ErrorKind::kComm>(what);
    case ErrorKind::kIo:
      throw IoError(what);
    case ErrorKind::kOutOfMemory:
      throw MemoryError(what);
    case ErrorKind::kUsage:
      throw UsageError(what);
    case ErrorKind::kData:
      throw DataError(what);
    case ErrorKind::kCheckpoint:
      throw CheckpointError(what);
    case ErrorKind::kNumerical:
      throw NumericalError(what);
  }
  throw ErrorOf<ErrorKind::kInvalidArgument>(what);
}

}  // namespace moiety
