// The recorder of a step's trace, and the comparison of traces between ranks before a plan is made
// (docs/spec/gtp.md#recording).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "moiety/comm/bootstrap.h"
#include "moiety/gtp/plan.h"

namespace moiety::gtp {

// The device's work for a call, computed from shapes: computing beside the traffic of its memory,
// and then bytes that come from other ranks.
struct Work {
  double flops = 0, bytes = 0, received = 0;
  Work& operator+=(Work more) {
    flops += more.flops;
    bytes += more.bytes;
    received += more.received;
    return *this;
  }
};

class Recorder {
 public:
  // The policy's rates turn work into time.
  explicit Recorder(const Policy& policy) : policy_(policy) {}

  // Begins a step and drops the trace of the last one. A step that departs from its plan continues
  // from the calls that agreed, `calls` (kBegin is the first).
  void begin(std::span<const TraceEvent> calls = {});
  // Records one call: a consume of these bundles, another call of one bundle, or kCut without one.
  // `work` is the work between this call and the next.
  void call(Kind kind, std::span<const BundleId> bundles, Work work = {});
  // Adds more work behind the latest call: attention, dispatch.
  void note_work(Work work);
  // Ends the step with kFlush. The trace is complete and stays until the next begin.
  std::span<const TraceEvent> seal();

 private:
  float time_of(Work work) const;

  Policy policy_;
  std::vector<TraceEvent> events_;
};

// Rank 0's policy, on every rank. Collective.
Policy agree_policy(comm::Bootstrap& bootstrap, const Policy& policy);

// Checks that all ranks pass equal traces, since plans of different traces would wait for each
// other for ever. Collective. If not, throws Error(kInvalidArgument) on every rank, with the first
// block of events that differs from rank 0's and both sides' first different event. `step` names
// the step in the text.
void compare_traces(comm::Bootstrap& bootstrap, std::string_view step,
                    std::span<const TraceEvent> trace);

}  // namespace moiety::gtp
