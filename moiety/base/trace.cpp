#include "moiety/base/trace.h"

#include <algorithm>
#include <chrono>

namespace moiety {
namespace {

thread_local std::array<int64_t, kTraceLanes> t_waited{};
thread_local int t_waits = 0;  // WaitSpans that are open

}  // namespace

const char* name(TraceLane lane) {
  static constexpr const char* kNames[] = {"host", "compute", "tp", "gtp",
                                           "egtp", "ep",      "dp", "data"};
  return kNames[static_cast<int>(lane)];
}

int64_t trace_clock() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void TraceSpan::begin(TraceLane lane, const char* name, std::initializer_list<TraceArg> args) {
  if (range_) detail::push_range(name);
  if (!trace_) return;
  event_ = trace_->events.size();
  TraceEvent& event = trace_->events.emplace_back();
  event.name = name;
  event.lane = lane;
  std::copy_n(args.begin(), std::min<size_t>(args.size(), TraceEvent::kMaxArgs),
              event.args.begin());
  event.begin = trace_clock();
  if (!trace_->stream_) return;
  marks_ = trace_->marks_.size();
  trace_->marks_.push_back({event_, {}, {}});
  trace_->mark(trace_->marks_.back().begin);
}

void TraceSpan::end() {
  if (range_) detail::pop_range();
  if (!trace_) return;
  trace_->events[event_].end = trace_clock();
  if (trace_->stream_) trace_->mark(trace_->marks_[marks_].end);
}

void Trace::mark(Event& event) {
  event = Event::timed();
  event.record(*stream_);
}

void Trace::follow(const Stream& stream) {
  stream_ = stream;
  mark(origin_);
  origin_.wait();
  origin_time_ = trace_clock();
}

void Trace::settle() {
  if (!stream_) return;
  stream_->synchronize();
  const auto time = [&](const Event& mark) {
    return origin_time_ + static_cast<int64_t>(1e6 * elapsed_ms(origin_, mark));
  };
  for (const Marks& m : marks_) {
    events[m.event].begin = time(m.begin);
    events[m.event].end = time(m.end);
  }
  marks_.clear();
  stream_.reset();
}

void TraceSpan::add(const TraceArg& arg) {
  if (!trace_) return;
  for (TraceArg& free : trace_->events[event_].args) {
    if (free.name) continue;
    free = arg;
    return;
  }
}

int64_t waited_ns(TraceLane axis) { return t_waited[static_cast<int>(axis)]; }

WaitSpan::WaitSpan(TraceLane axis, const char* name, std::initializer_list<TraceArg> args)
    : span_(axis, name, args), axis_(axis), begin_(trace_clock()) {
  ++t_waits;
}

WaitSpan::~WaitSpan() {
  if (--t_waits == 0) t_waited[static_cast<int>(axis_)] += trace_clock() - begin_;
}

}  // namespace moiety
