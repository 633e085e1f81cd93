#include "moiety/base/dtype.h"

namespace moiety {

const char* name(DType t) {
  switch (t) {
    case DType::kFloat64:
      return "float64";
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kInt64:
      return "int64";
    case DType::kInt32:
      return "int32";
    case DType::kUInt64:
      return "uint64";
    case DType::kUInt32:
      return "uint32";
    case DType::kUInt8:
      return "uint8";
    case DType::kE4M3:
      return "e4m3";
    case DType::kE5M2:
      return "e5m2";
    case DType::kUE8M0:
      return "ue8m0";
    case DType::kE2M1:
      return "e2m1";
  }
  return "unknown";
}

}  // namespace moiety
