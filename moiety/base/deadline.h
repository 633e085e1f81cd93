// Time limits and polite polling. Every wait of the library has a deadline.
#pragma once

#include <chrono>
#include <cstdint>

namespace moiety {

using Seconds = std::chrono::duration<double>;

class Deadline {
 public:
  explicit Deadline(Seconds limit) : start_(Clock::now()), limit_(limit) {}
  bool expired() const { return elapsed() >= limit_; }
  Seconds elapsed() const { return Clock::now() - start_; }
  Seconds limit() const { return limit_; }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_;
  Seconds limit_;
};

// Tells whether the calling thread is one of more ranks than there are cores: it then polls less
// eagerly.
void set_crowded(bool crowded);

// The pauses of a polling loop: 1000 processor pauses first (yields in a crowd), then yields, then
// sleeps of 20 us, so that ranks which share a core let each other run.
class Backoff {
 public:
  void pause();
  // True when the caller should look at the clock and at whatever else costs more than a poll: now
  // and then while the pauses are short, always when they are long.
  bool time_to_look() const;
  int64_t polls() const { return polls_; }

 private:
  int64_t polls_ = 0;
};

}  // namespace moiety
