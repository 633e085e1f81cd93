// Waits for words that peers store, with the limits that every wait has.
#pragma once

#include "moiety/base/deadline.h"
#include "moiety/comm/bootstrap.h"
#include "moiety/comm/flags.h"

namespace moiety::comm {

// The reasons to end a wait early. `poison` is a word that a peer makes non-zero to stop this
// rank's waits; `bootstrap` is asked for aborts. Both may be null.
struct WaitLimits {
  Seconds deadline{100};
  Bootstrap* bootstrap = nullptr;
  uint64_t* poison = nullptr;
};

enum class WaitResult { kReady, kExpired, kPoisoned, kAborted };

// Polls `ready()` until it is true. Clock, poison and abort are looked at every 256 polls at first,
// so a wait that is nearly over costs nothing but its polls. The caller words the error, since it
// knows the peer.
template <class Ready>
WaitResult wait_until(Ready&& ready, const WaitLimits& limits) {
  if (ready()) return WaitResult::kReady;
  const Deadline deadline(limits.deadline);
  Backoff backoff;
  while (true) {
    backoff.pause();
    if (ready()) return WaitResult::kReady;
    if (!backoff.time_to_look()) continue;
    if (limits.poison && load_relaxed(*limits.poison) != 0) return WaitResult::kPoisoned;
    if (limits.bootstrap && limits.bootstrap->aborted()) return WaitResult::kAborted;
    if (deadline.expired()) return WaitResult::kExpired;
  }
}

// Waits until the word, which only grows, is at least `value`.
inline WaitResult wait_at_least(uint64_t& word, uint64_t value, const WaitLimits& limits) {
  return wait_until([&] { return load_acquire(word) >= value; }, limits);
}

}  // namespace moiety::comm
