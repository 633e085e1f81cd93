// Traces of the steps that profile.steps names, as Chrome trace JSON: profile/steps-a-b.json, for
// Perfetto (ui.perfetto.dev) or chrome://tracing.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "moiety/base/trace.h"
#include "moiety/comm/communicator.h"
#include "moiety/train/config.h"

namespace moiety::train {

// The time for which the calling thread has stood at waits for other ranks.
struct PeerWaits {
  std::array<int64_t, kWaitAxes.size()> ns{};  // by axis

  static PeerWaits now() {
    PeerWaits waits;
    for (size_t a = 0; a < kWaitAxes.size(); ++a) waits.ns[a] = waited_ns(kWaitAxes[a]);
    return waits;
  }
  int64_t& of(TraceLane axis) {
    return ns[static_cast<size_t>(std::ranges::find(kWaitAxes, axis) - kWaitAxes.begin())];
  }
  PeerWaits operator-(const PeerWaits& b) const {
    PeerWaits difference;
    for (size_t a = 0; a < ns.size(); ++a) difference.ns[a] = ns[a] - b.ns[a];
    return difference;
  }
};

// A rank's profile. Every rank writes its own file beside the joined one; the rank that comes last
// finds the files of all others and joins them, so nobody waits.
class Profiler {
 public:
  Profiler(const ProfileSteps& steps, const std::filesystem::path& run_directory,
           comm::Communicator& world);
  // Writes the events recorded so far, if training ended earlier.
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  bool covers(int64_t step) const { return step >= steps_.begin && step < steps_.end; }

  // The end of a step: it is complete, and with the last one the file is written; or it counts for
  // nothing and will be made again, so that what was recorded of it is dropped.
  void keep(int64_t step);
  void drop(int64_t step);

  // Makes the calling thread record during its lifetime, if the step is one of them. On a GPU it
  // records the times of its operations on `stream`, which is waited for at the end. Made on every
  // rank, since the first one is a barrier.
  class Step {
   public:
    Step(Profiler& profiler, int64_t step, const Stream& stream);
    ~Step();
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    Profiler& profiler_;
    std::optional<TraceSpan> span_;
    int64_t step_;
  };

 private:
  void align_clocks();
  void write() noexcept;
  // Writes this rank's file; returns the name of the files of these steps.
  std::string write_own() const;
  void join(const std::string& stem) const;

  ProfileSteps steps_;
  std::filesystem::path directory_;
  comm::Communicator& world_;
  int64_t origin_ = 0;            // the clock's value at the begin of the trace
  int64_t first_ = 0, last_ = 0;  // steps recorded
  Trace trace_;
  size_t events_before_ = 0, samples_before_ = 0;  // of the trace, before step `last_`
};

// Adds a sample of the process's memory to the trace of the calling thread, if it has one.
void trace_memory();

// The events of a rank, each as one line of JSON, with commas between them.
std::string trace_events(const Trace& trace, int rank, int64_t origin);

}  // namespace moiety::train
