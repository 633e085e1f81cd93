// A profile of a rank's thread: spans of its operations, and the time that it stands at waits for
// its peers.
//
// An operation opens a span where it runs: `const TraceSpan span(TraceLane::kCompute, "gemm",
// {{"m", m}, {"flops", 2 * m * n * k}});`. While the thread has a Trace, the span becomes an event
// of it; otherwise a span costs the load of a thread-local pointer. Spans of a thread nest. Worker
// threads of parallel loops have no trace: their work belongs to the span around the loop. In a
// build with CUDA that runs under a profiler of NVTX ranges (Nsight Systems) every span is also a
// range of the domain "moiety".
//
// Waits for peers are always timed, since every step line tells their share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "moiety/base/stream.h"

namespace moiety {

// The rows of a rank in a profile.
enum class TraceLane : uint8_t { kHost, kCompute, kTp, kGtp, kEgtp, kEp, kDp, kData };
inline constexpr int kTraceLanes = 8;
const char* name(TraceLane lane);

// The lanes that are also axes of waiting: tensor parallelism, gathers and reduces of dense weights
// and of experts, expert parallelism, and everything else that ranks do together.
inline constexpr std::array kWaitAxes{TraceLane::kTp, TraceLane::kGtp, TraceLane::kEgtp,
                                      TraceLane::kEp, TraceLane::kDp};

// A number that belongs to a span: a size, or the "flops" or "bytes" of the work, from which a
// profile computes rates. `name` lives as long as the program.
struct TraceArg {
  const char* name = nullptr;
  double value = 0;

  TraceArg() = default;
  template <class T>
  TraceArg(const char* n, T v) : name(n), value(static_cast<double>(v)) {}
};

// Nanoseconds of the machine's steady clock, which the processes of a machine share.
int64_t trace_clock();

struct TraceEvent {
  static constexpr int kMaxArgs = 6;
  const char* name = nullptr;
  TraceLane lane = TraceLane::kHost;
  int64_t begin = 0;
  int64_t end = 0;                        // 0 while the span is open
  std::array<TraceArg, kMaxArgs> args{};  // unused ones have no name
};

// A quantity over time, such as memory.
struct TraceSample {
  const char* name = nullptr;
  int64_t time = 0;
  double value = 0;
};

// The record of a thread. It is read, emptied or destroyed only while none of its spans is open.
//
// On a GPU an operation is over on the host when it has been enqueued. While a trace follows a
// stream of a GPU, its spans mark that stream at both ends, and `settle` replaces the host's times
// by the device's. The marks cost time between operations, so the whole is slower.
struct Trace {
  std::vector<TraceEvent> events;  // in the order in which they began
  std::vector<TraceSample> samples;

  void follow(const Stream& stream);
  // Waits for the stream and takes the device's times; spans that begin later have the host's.
  void settle();

 private:
  friend class TraceSpan;
  struct Marks {
    size_t event = 0;
    Event begin, end;
  };
  void mark(Event& event);

  std::optional<Stream> stream_;
  Event origin_;
  int64_t origin_time_ = 0;
  std::vector<Marks> marks_;
};

namespace detail {
inline constinit thread_local Trace* current_trace = nullptr;

// NVTX ranges (trace_cuda.cpp, no_trace_cuda.cpp).
bool find_range_listener();
void push_range(const char* name);
void pop_range();
inline bool has_range_listener() {
  static const bool has = find_range_listener();
  return has;
}
}  // namespace detail

// The trace of the calling thread; null if it has none.
inline Trace* current_trace() { return detail::current_trace; }
inline void set_current_trace(Trace* trace) { detail::current_trace = trace; }

class TraceSpan {
 public:
  // Arguments beyond TraceEvent::kMaxArgs are dropped.
  TraceSpan(TraceLane lane, const char* name, std::initializer_list<TraceArg> args = {})
      : trace_(current_trace()), range_(detail::has_range_listener()) {
    if (trace_ || range_) [[unlikely]]
      begin(lane, name, args);
  }
  ~TraceSpan() {
    if (trace_ || range_) [[unlikely]]
      end();
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

  bool recording() const { return trace_ != nullptr; }
  // Adds a number that is known only when the work is done.
  void add(const TraceArg& arg);

 private:
  void begin(TraceLane lane, const char* name, std::initializer_list<TraceArg> args);
  void end();

  Trace* trace_;
  size_t event_;  // index in the trace
  size_t marks_;  // index in the trace, if it follows a stream
  bool range_;
};

// Nanoseconds that the calling thread has stood at waits for peers on this axis, since it started.
int64_t waited_ns(TraceLane axis);

// A span during which the thread stands at a wait for peers. Only the outermost one is timed.
class WaitSpan {
 public:
  WaitSpan(TraceLane axis, const char* name, std::initializer_list<TraceArg> args = {});
  ~WaitSpan();
  WaitSpan(const WaitSpan&) = delete;
  WaitSpan& operator=(const WaitSpan&) = delete;

 private:
  TraceSpan span_;
  TraceLane axis_;
  int64_t begin_;
};

}  // namespace moiety
