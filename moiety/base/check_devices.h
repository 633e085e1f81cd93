// For the entries of operations: where all arguments are.
#pragma once

#include <initializer_list>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety {

struct NamedView {
  const char* name;
  const TensorView& view;
};

// Throws as check_device for any argument; whether the stream is of a GPU.
inline bool check_devices(const char* operation, std::initializer_list<NamedView> arguments,
                          const Stream& stream) {
  for (const NamedView& a : arguments) check_device(operation, a.name, a.view, stream);
  return stream.device().type == DeviceType::kCuda;
}

}  // namespace moiety
