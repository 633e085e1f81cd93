// Traces of the steps that profile.steps names, as Chrome trace JSON: profile/steps-a-b.json, for
// Perfetto (ui.perfetto.dev) or chrome://tracing.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "moiety/base/trace.h"
#include "moiety/comm/communicator.h"
#include "moiety/train/config.h"

namespace moiety::train {

// How long the calling thread has stood at waits for other ranks.
struct PeerWaits {
  std::array<int64_t, kWaitAxes.size()> ns{};  // by axis

  static PeerWaits now() {
    PeerWaits waits;
    for (size_t a = 0; a < kWaitAxes.size(); ++a) waits.ns[a] = waited_ns(kWaitAxes[a]);
    return waits;
  }
  PeerWaits operator-(const PeerWaits& b) const {
    PeerWaits difference;
    for (size_t a = 0; a < ns.size(); ++a) difference.ns[a] = ns[a] - b.ns[a];
    return difference;
  }
};

// A rank's profile. Every rank writes its own file beside the whole; whichever is the last finds
// those of all the others and joins them, so nobody waits.
class Profiler {
 public:
  Profiler(const ProfileSteps& steps, const std::filesystem::path& run_directory,
           comm::Communicator& world);
  // Writes what has been recorded, if training ended earlier.
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  bool covers(int64_t step) const { return step >= steps_.begin && step < steps_.end; }

  // The calling thread records during its lifetime, if the step is one of them: on a GPU what its
  // operations take on `stream`, which is waited for at the end. On every rank: the first one is a
  // barrier.
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
  // This rank's file; gives what the files of these steps are called.
  std::string write_own() const;
  void join(const std::string& stem) const;

  ProfileSteps steps_;
  std::filesystem::path directory_;
  comm::Communicator& world_;
  int64_t origin_ = 0;            // of the clock, at the begin of the trace
  int64_t first_ = 0, last_ = 0;  // steps recorded
  Trace trace_;
};

// A sample of the process's memory in the trace of the calling thread, if it has one.
void trace_memory();

// The events of a rank, each one line of JSON, behind one another with commas.
std::string trace_events(const Trace& trace, int rank, int64_t origin);

}  // namespace moiety::train
