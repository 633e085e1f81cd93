// The wish that what this process is doing for long ends early, as by Ctrl-C. Operations that read,
// write or measure for seconds look at it between their pieces; a wish is made, and taken back, by
// whoever called them (moiety/capi/interrupt.h).
#pragma once

#include <atomic>

namespace moiety {

void set_interrupted(bool wanted);
// True while the wish is there; for operations that are told to stop by such an address.
const std::atomic<bool>& interrupt_flag();
inline bool interrupted() { return interrupt_flag().load(std::memory_order_relaxed); }
// Throws Error(kIo) "interrupted" while the wish is there.
void check_interrupt();

}  // namespace moiety
