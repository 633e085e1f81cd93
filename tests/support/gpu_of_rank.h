// The GPU of a rank in tests: ranks take those of the machine in turn, and share the one there is.
#pragma once

#include <algorithm>

#include "moiety/base/gpu.h"

namespace moiety {

inline Device gpu_of(int rank) {
  return {DeviceType::kCuda, rank % std::max(1, gpu_status().count)};
}

}  // namespace moiety
