// The wish that what this process is doing for long ends early, as by Ctrl-C. Operations that read,
// write or measure for seconds look at it between their pieces; a wish is made, and taken back, by
// whoever called them (moiety/capi/interrupt.h).
#pragma once

#include <atomic>

#include "moiety/base/error.h"

namespace moiety {

// For operations that are told to stop by such an address; only callers of operations write it.
inline std::atomic<bool> interrupt_wanted = false;

inline bool interrupted() { return interrupt_wanted.load(std::memory_order_relaxed); }
// Throws Error(kIo) "interrupted" while the wish is there.
inline void check_interrupt() {
  if (interrupted()) fail(ErrorKind::kIo, "interrupted");
}

}  // namespace moiety
