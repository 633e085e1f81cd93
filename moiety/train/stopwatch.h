// Seconds between calls.
#pragma once

#include <chrono>

namespace moiety::train {

class Stopwatch {
 public:
  double lap() {
    const auto now = Clock::now();
    const std::chrono::duration<double> d = now - start_;
    start_ = now;
    return d.count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

}  // namespace moiety::train
