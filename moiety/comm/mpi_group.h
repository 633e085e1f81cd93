// Ranks that are processes which an MPI launcher started, mpirun -np 8 moiety train ..., or which
// start_ranks started (comm/local_group.h), without MPI.
//
// MPI is a module that is opened at run time (mpi/mpi_loader.h), so the program runs where there is
// no MPI. It serves as bootstrap and carrier of bytes; sums are Moiety's own, so results are the
// bits of ranks that are threads. Only the thread that calls run_mpi_rank (or `processes`, if that
// came first) ever calls MPI. In a process of start_ranks a table over sockets stands for MPI, with
// the same functions (mpi/functions.h), so all that is said here of MPI holds there too.
//
// A program uses it like this:
//
//    try {
//      comm::run_mpi_rank(options, [&](comm::Communicator& world) { code = train(world); });
//    } catch (const std::exception& e) {       // peers have been told, and stop within a second
//      print(e.what());
//      comm::mpi::end_process(exit_code(e));  // no destructor of MPI's, nothing that could hang
//    }
//    return code;                             // MPI is shut down already
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "moiety/base/deadline.h"
#include "moiety/comm/communicator.h"
#include "moiety/comm/gpu_transport.h"

namespace moiety::comm {

struct MpiGroupOptions {
  Seconds deadline{100};  // limit of every wait
  // False keeps ranks from mapping each other's memory even where they could (for tests).
  bool map_memory = true;
  GpuTransport gpu_transport = GpuTransport::kAuto;
  // Longer tensors travel in several messages; MPI counts bytes with an int.
  int64_t largest_message = int64_t{1} << 30;
};

// Runs body(world) on the calling thread as one rank of all processes that the launcher started,
// once per process. The thread's log rank is its rank in the world; its thread budget is
// OMP_NUM_THREADS or, where that is not set, the cores that the ranks of this host may use, divided
// by these ranks, at least 1. Both are restored at the end.
//
// - The body returns: all ranks meet in a barrier with the deadline, then MPI is shut down, so no
//   rank ends while a peer still needs it. A rank that does not come is Error(kComm).
// - The body throws: the peers are told the text (Bootstrap::abort), then the exception is
//   rethrown. MPI stays up, as shutting it down would wait for the peers: the caller ends the
//   process with `mpi::end_process`.
// - A rank that dies without a word (kill -9) is found by its peers on the same host within a
//   second, in any wait: Error(kComm) with `rank 2 (process 1234) has ended`.
//
// Throws Error(kUnsupported) if MPI is not available, with the sentence of mpi::status().
void run_mpi_rank(const MpiGroupOptions& options,
                  const std::function<void(Communicator& world)>& body);

namespace mpi {

// Whether MPI can be used, found out without starting it. `text` is the sentence that `moiety
// doctor` prints: the library found and where, or what is missing and what to install.
struct Status {
  bool available = false;
  std::string text;
};
Status status();

// The launch as MPI sees it: this process's rank and the number of processes. Starts MPI if need
// be, so call it only where a launcher is at work; one process means that the launcher is not
// MPI's. Throws Error(kUnsupported) as above. MPI's own start waits for every process: if it takes
// longer than the deadline, the process says so and ends with exit code 7.
struct Processes {
  int rank = 0, size = 1;
};
Processes processes(Seconds deadline = Seconds(100));

// The rank because of which the run is over, if it is: `rank 2 (process 1234) has ended`, or `rank
// 2 failed: TEXT` if it said so (Bootstrap::aborted). Unlike Bootstrap::aborted, this looks at the
// processes of this host at once. For the rank's thread, at any time, also after a failure; empty
// outside run_mpi_rank.
std::optional<std::string> dead_peer();

// Ends the process with this exit code at once: flushes stdout and stderr, runs no destructors and
// no handlers, leaves MPI as it is.
[[noreturn]] void end_process(int code);

}  // namespace mpi
}  // namespace moiety::comm
