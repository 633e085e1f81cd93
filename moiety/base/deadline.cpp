#include "moiety/base/deadline.h"

#include <thread>

namespace moiety {

void Backoff::pause() {
  ++polls_;
  if (polls_ < 1000) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  } else if (polls_ < 2000) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace moiety
