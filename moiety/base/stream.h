// An order of operations on a device, and marks in it.
//
// On a CPU a stream runs operations inline on the calling thread; it is an order, not a thread. The
// deferred stream, for tests, keeps operations back until something waits for them, so that a
// missing edge between two streams shows as a wrong result. A stream of a GPU is a cudaStream_t.
//
// A CPU operation is written `stream.run([=] { ... })` after its arguments are checked; views are
// captured by value. A GPU operation launches kernels on the stream (launch.cuh).
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <utility>

#include "moiety/base/device.h"

namespace moiety {

class Event;
class TensorView;

class Stream {
 public:
  // The inline stream of the CPU.
  Stream() = default;
  // A CPU stream that defers its operations until `synchronize` or a wait on its events.
  static Stream deferred();
  // A new stream of a GPU, which neither waits for the legacy default stream nor holds it up; of a
  // CPU the inline stream. Throws as `require_device`.
  static Stream on(Device device);
  // A cudaStream_t of the caller's, such as PyTorch's current one, which must outlive this stream,
  // its copies and what runs on them; null is the legacy default stream.
  static Stream external(Device gpu, void* cuda_stream);

  Device device() const { return state_ ? state_->device : Device{}; }
  // The cudaStream_t; throws for a CPU stream.
  void* cuda_stream() const;

  // CPU streams only.
  template <class F>
  void run(F&& f) const {
    if (!state_) {
      std::forward<F>(f)();
    } else {
      defer(std::forward<F>(f));
    }
  }

  // What is run on this stream later happens after what `event` marks. Where the two are not both
  // on GPUs the host waits: of the CPU stream when its turn comes, of a GPU's stream now.
  void wait(const Event& event) const;
  // Returns when everything run so far has happened.
  void synchronize() const;

 private:
  friend class Event;
  struct State {
    Device device;
    // Of a deferred stream.
    std::list<std::function<void()>> pending;
    int64_t done = 0;  // operations that have run
    // Of a GPU's stream.
    void* cuda_stream = nullptr;
    bool owned = false;

    ~State();
    bool on_gpu() const { return device.type == DeviceType::kCuda; }
    int64_t count() const { return done + static_cast<int64_t>(pending.size()); }
    void run_until(int64_t count);
  };
  void defer(std::function<void()> f) const;

  std::shared_ptr<State> state_;  // null: inline
};

// A point in a stream. An event that was never recorded is complete; recording again moves it, but
// not its copies. On a GPU it is a cudaEvent_t, made at the first recording and used again unless a
// copy still has it.
class Event {
 public:
  Event() = default;
  // An event for `elapsed_ms`.
  static Event timed();

  void record(const Stream& stream);
  bool complete() const;
  // Blocks the host until the point is reached.
  void wait() const;

  // Milliseconds from `begin` to `end`: timed, recorded on streams of one device, and complete.
  friend double elapsed_ms(const Event& begin, const Event& end);

 private:
  friend class Stream;
  struct GpuEvent {
    int device;
    void* cuda_event;
    ~GpuEvent();
  };
  bool timed_ = false;
  std::shared_ptr<Stream::State> state_;  // of a deferred stream
  int64_t count_ = 0;
  std::shared_ptr<int64_t> time_;  // on a CPU, if timed
  std::shared_ptr<const GpuEvent> gpu_;
};
double elapsed_ms(const Event& begin, const Event& end);

// Throws unless `x` is absent or on the stream's device: "quantize: x is float32[4], but must be
// on cuda:0 as the stream".
void check_device(const char* operation, const char* argument, const TensorView& x,
                  const Stream& stream);

}  // namespace moiety
