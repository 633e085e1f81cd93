#include "moiety/base/deadline.h"

#include <thread>

namespace moiety {
namespace {

constexpr int64_t kPauses = 1000;
constexpr int64_t kYields = 1000;
thread_local bool t_crowded = false;

}  // namespace

void set_crowded(bool crowded) { t_crowded = crowded; }

void Backoff::pause() {
  ++polls_;
  if (polls_ < kPauses && !t_crowded) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  } else if (polls_ < kPauses + kYields) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

bool Backoff::time_to_look() const {
  if (polls_ < kPauses && !t_crowded) return polls_ % 256 == 0;
  return polls_ >= kPauses + kYields || polls_ % 16 == 0;
}

}  // namespace moiety
