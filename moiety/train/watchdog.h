// Ends a process whose ranks make no progress: what every rank stands at goes to stderr and to
// failures/, then the caller's function ends the process, since a rank that hangs cannot be
// unwound. One thread, which never communicates. A time for which it did not run itself, since the
// process was stopped (Ctrl-Z) or the machine paused, counts for nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <pthread.h>
#include <string>
#include <thread>
#include <vector>

#include "moiety/base/deadline.h"
#include "moiety/base/json_line.h"

namespace moiety::train {

class Watchdog;

// The progress of a rank, told by its thread.
class Heartbeat {
 public:
  // The heartbeat of the calling thread, until its end. Without a watchdog nobody listens.
  Heartbeat(Watchdog* watchdog, int rank);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // A step is complete (or training begins after it).
  void step(int64_t completed);
  // Names a part of the step; `name` lives as long as the program.
  void phase(const char* name) { phase_.store(name, std::memory_order_relaxed); }

  // A scope for evaluation, checkpoints and loading, which have kPatience times as long and do not
  // count as the step's time.
  class Aside {
   public:
    Aside(Heartbeat& heartbeat, const char* name) : heartbeat_(heartbeat) {
      heartbeat.begin_aside(name);
    }
    ~Aside() { heartbeat_.end_aside(); }

   private:
    Heartbeat& heartbeat_;
  };
  static constexpr int kPatience = 10;

  int rank() const { return rank_; }
  int64_t completed() const { return step_; }
  const char* phase() const { return phase_.load(std::memory_order_relaxed); }
  double silent_seconds() const;

 private:
  friend class Watchdog;
  void begin_aside(const char* name);
  void end_aside();
  void restart();
  // Does not count a time for which the whole process stood still.
  void forgive(int64_t ns);

  Watchdog* watchdog_;
  const int rank_;
  const pthread_t thread_;
  std::atomic<int64_t> step_{0};
  std::atomic<const char*> phase_{"start"};
  std::atomic<int64_t> since_;  // ns of the steady clock
  std::atomic<int> patience_{kPatience};
};

class Watchdog {
 public:
  // `limit` is the seconds without a completed step. `end_process` does not return and is legal in
  // a signal handler: it calls _exit.
  using EndProcess = void (*)();
  Watchdog(Seconds limit, std::filesystem::path run_directory, EndProcess end_process);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  friend class Heartbeat;
  void watch();
  [[noreturn]] void end(const Heartbeat& silent);

  const Seconds limit_;
  const std::filesystem::path run_directory_;
  const EndProcess end_process_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::vector<Heartbeat*> ranks_;
  std::thread thread_;
};

// The stack of a thread of this process: frames as "binary(function+offset)", innermost first.
// Empty if the thread does not answer within a fifth of a second.
std::vector<std::string> stack_of(pthread_t thread);

}  // namespace moiety::train
