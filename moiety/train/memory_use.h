// The memory that a rank takes now, for step lines.
#pragma once

#include "moiety/base/device.h"

namespace moiety::train {

// Bytes. On a CPU the memory that this process has, and the machine's memory. On a GPU the memory
// that is not free (whoever took it), and its size; a rank gives nothing back between steps, so
// that is the most that it had.
struct MemoryUse {
  double used = 0;
  double total = 0;
};
MemoryUse memory_use(Device device);

}  // namespace moiety::train
