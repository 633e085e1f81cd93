// The parts of an executor. Internal to moiety/gtp; the contract is in executor.h.
#pragma once

#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "moiety/gtp/bundle.h"
#include "moiety/gtp/plan_stages.h"

namespace moiety::gtp {

// Whether two streams are the same order; on a GPU, the same cudaStream_t.
bool same(const Stream& a, const Stream& b);

// An event of a plan: a point on each of the streams that recorded it.
class Marks {
 public:
  void clear() { used_ = 0; }
  // Moves the stream's point.
  void record(const Stream& stream);
  // Makes `stream` wait for the points on other streams.
  void wait(const Stream& stream) const;

 private:
  std::vector<std::pair<Stream, Event>> points_;  // those behind `used_` are kept for their events
  size_t used_ = 0;
};

// A stream of the executor's own, for the operations of one group, class and purpose.
struct ExecutorLane {
  int group = 0;
  bool expert = false, reduces = false;
  Stream stream;
  Event edge;               // from the caller's stream, or to it
  Event sent;               // E6 of the latest reduce in a step on demand
  Event tail;               // the lane's last operation in the graph segment before
  int32_t segment = 0;      // segment of its latest operation
  bool used = false;        // used since the last flush
  SlotArena::Slot scratch;  // memory of reduces on demand, in this step
};

// Memory in which gathers of a bundle land, with the views of it.
struct Landed {
  Landed(const BundleLayout& bundle, Views views, TensorView slot, TensorView scratch)
      : landing(bundle.gather(views), slot, scratch), view(bundle.landed(landing, quantized)) {}
  Landed(const Landed&) = delete;
  Landed& operator=(const Landed&) = delete;

  Landing landing;
  std::vector<QuantizedView> quantized;
  View view;
};

// Landings, each made once for a place, since tables of a GPU's kernels belong to them.
class LandingTable {
 public:
  Landed& at(BundleId bundle, const BundleLayout& layout, Views views, TensorView slot,
             TensorView scratch);

 private:
  using Key = std::tuple<BundleId, Views, void*, void*>;
  std::map<Key, Landed> places_;
};

// A plan with its memory.
struct StepPlan {
  explicit StepPlan(std::span<const TraceEvent> events)
      : trace(events.begin(), events.end()), time(trace) {}
  StepPlan(const StepPlan&) = delete;
  StepPlan& operator=(const StepPlan&) = delete;

  std::vector<TraceEvent> trace;
  Timeline time;  // timeline of `trace`
  Plan plan;
  std::vector<SlotArena::Slot> slots;
  std::vector<size_t> lanes;                          // indices of the executor's lanes
  std::vector<Landed*> landed;                        // by gather
  std::vector<int32_t> gather_before, reduce_before;  // the one before in the slot, in this step
  std::vector<BundleId> untouched;  // trained weights without a gradient, in a step that has some
  std::vector<Marks> events;
};

// The state of a bundle in the course of a step.
struct BundleStep {
  bool published = false;  // E1 was waited for,
  Stream published_on;     // on this stream
  Event ready;
  bool derived = false;  // G == 1: the column view exists, made on derived_on
  Stream derived_on;
  Event columns;
  bool open = false;      // grad_buffer was called, reduce was not
  bool by_rows = false;   // the latest contribution was by rows
  int32_t opened_at = 0;  // position of the call
  SlotArena::Slot send;
  int64_t added = 0;  // number of contributions
  Event contributed;  // G == 1, on demand: the latest contribution
  bool reported = false;

  // Prepares for the next step; events stay, since they are used again.
  void reset() { published = derived = open = reported = false, added = 0; }
};

}  // namespace moiety::gtp
