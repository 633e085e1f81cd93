// Streams, which order the operations on a device, and events, which mark points in them.
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
  // On a GPU a new stream, which neither waits for the legacy default stream nor holds it up; on a
  // CPU the inline stream. Throws what `require_device` throws.
  static Stream on(Device device);
  // A stream over the caller's cudaStream_t, such as PyTorch's current one; null is the legacy
  // default stream. The cudaStream_t must outlive this stream, its copies and the work on them.
  static Stream external(Device gpu, void* cuda_stream);

  Device device() const { return state_ ? state_->device : Device{}; }
  // The cudaStream_t; throws for a CPU stream.
  void* cuda_stream() const;

  // Runs f in the order of the stream, which is a CPU stream.
  template <class F>
  void run(F&& f) const {
    if (!state_) {
      std::forward<F>(f)();
    } else {
      defer(std::forward<F>(f));
    }
  }

  // Makes operations that are run on this stream later wait for the point that `event` marks.
  // Unless both are on GPUs it is the host that waits: for a CPU stream when its turn comes, for a
  // GPU's stream now.
  void wait(const Event& event) const;
  // Returns when every operation run so far has happened.
  void synchronize() const;

 private:
  friend class Event;
  struct State {
    Device device;
    // Fields of a deferred stream.
    std::list<std::function<void()>> pending;
    int64_t done = 0;  // operations that have run
    // Fields of a GPU's stream.
    void* cuda_stream = nullptr;
    bool owned = false;

    ~State();
    bool on_gpu() const { return device.type == DeviceType::kCuda; }
    int64_t count() const { return done + static_cast<int64_t>(pending.size()); }
    void run_until(int64_t count);
  };
  void defer(std::function<void()> f) const;

  std::shared_ptr<State> state_;  // null for the inline stream
};

// A point in a stream. An event that was never recorded is complete. Recording again moves the
// event, but not its copies. On a GPU it is a cudaEvent_t, made at the first recording and used
// again unless a copy still has it.
class Event {
 public:
  Event() = default;
  // An event that `elapsed_ms` can read.
  static Event timed();

  void record(const Stream& stream);
  bool complete() const;
  // Makes the host wait until the point is reached.
  void wait() const;

  // Milliseconds from `begin` to `end`. Both are timed, recorded on streams of one device, and
  // complete.
  friend double elapsed_ms(const Event& begin, const Event& end);

 private:
  friend class Stream;
  struct GpuEvent {
    int device;
    void* cuda_event;
    ~GpuEvent();
  };
  bool timed_ = false;
  std::shared_ptr<Stream::State> state_;  // set for a deferred stream
  int64_t count_ = 0;
  std::shared_ptr<int64_t> time_;  // set on a CPU if timed
  std::shared_ptr<const GpuEvent> gpu_;
};
double elapsed_ms(const Event& begin, const Event& end);

// Throws Error(kInvalidArgument) unless `x` is absent or on the stream's device: "quantize: x is
// float32[4], but must be on cuda:0 as the stream".
void check_device(const char* operation, const char* argument, const TensorView& x,
                  const Stream& stream);

}  // namespace moiety
