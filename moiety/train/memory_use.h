// The memory that a rank takes now, for step lines.
#pragma once

#include "moiety/base/device.h"

namespace moiety::train {

// Bytes. Of a CPU: what this process has in memory, and the machine's memory. Of a GPU: what is not
// free of it (by whomever it was taken), and its memory; a rank gives nothing back between steps,
// so that is the most that it had.
struct MemoryUse {
  double used = 0;
  double total = 0;
};
MemoryUse memory_use(Device device);

}  // namespace moiety::train
