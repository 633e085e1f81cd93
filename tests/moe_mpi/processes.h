// The place that lets the typed suites of expert parallelism (tests/moe/ep_helpers.h) run on
// processes.
#pragma once

#include "moiety/comm/symmetric_buffer.h"
#include "tests/moe/ep_helpers.h"
#include "tests/support/mpi/world.h"

namespace moiety::moe {

// The ranks are the first processes of the run.
template <EpTransport transport>
struct Processes {
  static constexpr EpTransport kTransport = transport;
  static constexpr int kManyOperations = kSanitized ? 100 : 500;
  static bool available() {
    return transport == EpTransport::kCollectives || comm::mappable(comm::testing::world());
  }
  // Smaller groups are for smaller runs: processes that idle meanwhile would take the cores.
  static bool has(int ranks) { return available() && ranks == comm::testing::world().size(); }
  static void run(int ranks, const std::function<void(comm::Communicator&)>& body,
                  Seconds deadline = Seconds(60)) {
    comm::testing::MpiBackend::run(ranks, deadline, body);
  }
};
using MappedProcesses = Processes<EpTransport::kMapped>;
using CollectiveProcesses = Processes<EpTransport::kCollectives>;

}  // namespace moiety::moe
