// An order of operations on a device, and marks in it.
//
// On a CPU a stream runs operations inline on the calling thread; it is an order, not a thread. The
// deferred stream, for tests, keeps operations back until something waits for them, so that a
// missing edge between two streams shows as a wrong result.
//
// A CPU operation is written `stream.run([=] { ... })` after its arguments are checked; views are
// captured by value.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "moiety/base/device.h"

namespace moiety {

class Event;

class Stream {
 public:
  // The inline stream of the CPU.
  Stream() = default;
  // A CPU stream that defers its operations until `synchronize` or a wait on its events.
  static Stream deferred();

  Device device() const { return {}; }

  template <class F>
  void run(F&& f) const {
    if (!queue_) {
      std::forward<F>(f)();
    } else {
      queue_->pending.emplace_back(std::forward<F>(f));
    }
  }

  // What is run on this stream later happens after what `event` marks.
  void wait(const Event& event) const;
  // Returns when everything run so far has happened.
  void synchronize() const;

 private:
  friend class Event;
  struct Queue {
    std::deque<std::function<void()>> pending;
    int64_t done = 0;  // operations that have run
    void run_until(int64_t count);
  };
  std::shared_ptr<Queue> queue_;
};

// A point in a stream. An event that was never recorded is complete.
class Event {
 public:
  void record(const Stream& stream);
  bool complete() const;
  // Blocks the host until the point is reached.
  void wait() const;

 private:
  friend class Stream;
  std::shared_ptr<Stream::Queue> queue_;
  int64_t count_ = 0;
};

}  // namespace moiety
