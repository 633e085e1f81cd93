// The check that an operation makes before it reads its arguments: that all are where the stream
// runs.
#pragma once

#include <initializer_list>

#include "moiety/base/error.h"
#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety {

struct NamedView {
  const char* name;
  const TensorView& view;  // may be absent
};

// Whether the stream is a GPU's. Throws unless every argument is absent or on the stream's device:
// "quantize: x is float32[4], but must be on cuda:0 as the stream".
inline bool check_devices(const char* operation, std::initializer_list<NamedView> arguments,
                          const Stream& stream) {
  for (const NamedView& a : arguments) check_device(operation, a.name, a.view, stream);
  return stream.device().type == DeviceType::kCuda;
}

// The same for a table that is made before there is a stream: "table: scale float32[1] is on cpu,
// others on cuda:0".
inline void check_devices(const char* operation, std::initializer_list<NamedView> arguments,
                          Device place) {
  for (const auto& [argument, x] : arguments) {
    MOIETY_CHECK(!x.defined() || x.device() == place, "{}: {} {} is on {}, others on {}", operation,
                 argument, x.describe(), name(x.device()), name(place));
  }
}

}  // namespace moiety
