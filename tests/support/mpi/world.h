// Tests whose ranks are processes: every process runs all tests of the program, in the same order.
// tests/mpi/main.cpp is their main.
#pragma once

#include <functional>
#include <memory>

#include "moiety/comm/communicator.h"

namespace moiety::comm::testing {

// All processes of the run.
Communicator& world();
// Whether their operations on GPUs go over NCCL, each process on a GPU of its own.
bool over_nccl();

// The backend of typed suites: the body runs on the first `ranks` processes, as a world of their
// own; the others, and all if there are too few, pass. Waits have the deadline of the whole run.
struct MpiBackend {
  static void run(int ranks, Seconds deadline, const std::function<void(Communicator&)>& body);
};

}  // namespace moiety::comm::testing
