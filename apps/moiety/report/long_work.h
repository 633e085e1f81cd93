// What commands that write for minutes have in common: an end by a signal that leaves nothing
// behind, and a line of progress.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <optional>
#include <string>

#include "apps/moiety/report/console.h"

namespace moiety::app {

// While it lives, SIGINT, SIGTERM and SIGHUP set a flag that the work looks at between two pieces.
// Its end then ends the process, as the signal would have at once. There is one at a time.
class EndBySignal {
 public:
  EndBySignal();
  ~EndBySignal();
  EndBySignal(const EndBySignal&) = delete;
  EndBySignal& operator=(const EndBySignal&) = delete;
  static const std::atomic<bool>* flag();

 private:
  static constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> previous_;
};

// The progress of work on bytes: a status line on a terminal, elsewhere a log line now and then.
class ByteProgress {
 public:
  ByteProgress(std::string command, bool quiet);
  void update(uint64_t done, uint64_t all);

 private:
  using Clock = std::chrono::steady_clock;
  std::string command_;
  std::optional<Console> console_;  // none where nothing is to be shown
  Clock::time_point logged_ = Clock::now();
};

}  // namespace moiety::app
