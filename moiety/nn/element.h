// Element types that the model's operations are instantiated for: storage is float or bf16, with
// arithmetic in float; double is there for gradient checks.
#pragma once

#include "moiety/base/check_devices.h"
#include "moiety/base/dtype.h"
#include "moiety/base/error.h"
#include "moiety/formats/bf16.h"

namespace moiety::nn {

template <class T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
// The type of arithmetic on stored T.
template <class T>
using Compute = typename ComputeOf<T>::type;

// The dtype of parameter gradients (main_grad) and of row statistics for storage `d`.
constexpr DType compute_dtype(DType d) {
  return d == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

inline void check_element(const char* operation, DType d) {
  MOIETY_CHECK(d == DType::kFloat32 || d == DType::kBFloat16 || d == DType::kFloat64,
               "{}: {} elements, expected float32 or bfloat16", operation, name(d));
}

// Calls f(T{}) for the type T that `d` names. The dtype has been checked.
template <class F>
void with_element(DType d, F&& f) {
  if (d == DType::kBFloat16) {
    f(bf16{});
  } else if (d == DType::kFloat64) {
    f(double{});
  } else {
    f(float{});
  }
}

// The same on a GPU, where only storage types exist.
template <class F>
void with_storage(DType d, F&& f) {
  d == DType::kBFloat16 ? f(bf16{}) : f(float{});
}

// Whether an operation on elements of dtype `d` runs on a GPU. Throws Error(kInvalidArgument) if an
// argument is on another device than the stream, and for double on a GPU.
inline bool on_gpu(const char* operation, DType d, std::initializer_list<NamedView> arguments,
                   const Stream& stream) {
  if (!check_devices(operation, arguments, stream)) return false;
  if (d == DType::kFloat64) {
    fail(ErrorKind::kUnsupported, "{}: {} elements on a GPU, expected float32 or bfloat16",
         operation, name(d));
  }
  return true;
}

}  // namespace moiety::nn
