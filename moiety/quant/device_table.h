// Arrays on a GPU that are written once: the jobs of many tensors, for tables of operations.
#pragma once

#include <cstdint>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/copy.h"

namespace moiety::quant {

// A copy of `values` on the stream's device; it is there when the stream has come past.
template <class T>
Buffer upload(const std::vector<T>& values, const char* what, const Stream& stream) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  Buffer out(bytes, stream.device(), what);
  copy(out.view(DType::kUInt8, {bytes}),
       TensorView(const_cast<T*>(values.data()), DType::kUInt8, {bytes}), stream);
  return out;
}

}  // namespace moiety::quant
