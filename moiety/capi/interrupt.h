// Functions of the C interface that may take long, and end when the caller's program is told to.
#pragma once

#include <functional>

namespace moiety::capi {

// Runs `work`, which returns a code. On the process's main thread, where moiety_set_interrupt was
// called, it runs on a thread of its own while this one asks every 100 ms whether to go on; then the
// result is MOIETY_INTERRUPTED, which is returned when `work` has ended.
int interruptible(const std::function<int()>& work);

}  // namespace moiety::capi
