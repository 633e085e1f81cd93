// Records the trace of a step, and compares it between ranks before a plan is made of it
// (docs/spec/gtp.md#recording).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "moiety/comm/bootstrap.h"
#include "moiety/gtp/plan.h"

namespace moiety::gtp {

// What a call has the device do, from shapes: computing beside the traffic of its memory, and then
// bytes that come from other ranks.
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
  // Time of work by the policy's rates.
  explicit Recorder(const Policy& policy) : policy_(policy) {}

  // Begins a step and drops what was recorded. A step that departs from its plan goes on from the
  // calls that agreed, `calls` (kBegin is the first).
  void begin(std::span<const TraceEvent> calls = {});
  // One call: a consume of these bundles, another one of one bundle, or kCut of none. `work` is
  // what follows the call until the next.
  void call(Kind kind, std::span<const BundleId> bundles, Work work = {});
  // More of what follows the latest call: attention, dispatch.
  void note_work(Work work);
  // Ends the step with kFlush. The trace is whole and stays until the next begin.
  std::span<const TraceEvent> seal();

 private:
  float time_of(Work work) const;

  Policy policy_;
  std::vector<TraceEvent> events_;
};

// Collective: rank 0's policy, on every rank.
Policy agree_policy(comm::Bootstrap& bootstrap, const Policy& policy);

// Collective. Throws Error(InvalidArgument) on every rank, with the first block of events that
// differs from rank 0's and both sides' first different event, unless all ranks pass equal traces:
// plans of different traces would wait for each other for ever. `step` names the step in the text.
void compare_traces(comm::Bootstrap& bootstrap, std::string_view step,
                    std::span<const TraceEvent> trace);

}  // namespace moiety::gtp
