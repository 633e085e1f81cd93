#include "moiety/base/interrupt.h"

#include "moiety/base/error.h"

namespace moiety {
namespace {

std::atomic<bool> wanted_now = false;

}  // namespace

void set_interrupted(bool wanted) { wanted_now = wanted; }

const std::atomic<bool>& interrupt_flag() { return wanted_now; }

void check_interrupt() {
  if (interrupted()) fail(ErrorKind::kIo, "interrupted");
}

}  // namespace moiety
