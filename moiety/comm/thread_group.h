// Ranks that are threads of one process.
#pragma once

#include <functional>
#include <memory>

#include "moiety/base/deadline.h"
#include "moiety/comm/communicator.h"
#include "moiety/comm/gpu_transport.h"

namespace moiety::comm {

struct ThreadGroupOptions {
  Seconds deadline{100};   // limit of every wait
  bool map_memory = true;  // false keeps symmetric memory off (for tests)
  GpuTransport gpu_transport = GpuTransport::kAuto;
};

// Runs body(world) on `ranks` new threads, each with its own communicator, log rank and thread
// budget (cores, or OMP_NUM_THREADS, / ranks, at least 1), and returns when all have ended. If a rank throws, the group
// is aborted with its text, so its peers stop; the first rank's exception is rethrown here.
void run_thread_ranks(int ranks, const ThreadGroupOptions& options,
                      const std::function<void(Communicator& world)>& body);

}  // namespace moiety::comm
