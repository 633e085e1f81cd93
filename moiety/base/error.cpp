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
  }
  return "error";
}

}  // namespace moiety
