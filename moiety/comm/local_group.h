// Ranks that are processes of one host without a launcher: a process starts copies of its program,
// one for each rank, connected by sockets, and waits for them. In a started process
// comm/mpi_group.h works as under mpirun: run_mpi_rank makes it a rank, over the sockets.
//
//    if (!comm::is_started_rank()) {                       // the parent, which touches no GPU
//      return first_failure(comm::start_ranks(4, {.arguments = {"train", ...}}));
//    }
//    comm::run_mpi_rank(options, [&](comm::Communicator& world) { train(world); });
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "moiety/base/deadline.h"

namespace moiety::comm {

// The end of a rank's process.
struct RankEnd {
  int rank = 0;
  int64_t pid = 0;
  int code = 0;         // its exit code, if no signal ended it
  int signal = 0;       // the signal that ended it; 0: none
  bool told = false;    // the signal is one that the parent had been sent, and passed on
  bool killed = false;  // the parent ended it, since another one had failed before
  std::string text;     // what it told by report_failure
};

struct StartOptions {
  std::vector<std::string> arguments;  // without the program's name
  // Codes that are no failure. After any other end the remaining ranks have `patience` to end by
  // themselves, since they hear of it; then they are killed.
  std::vector<int> good_codes{0};
  Seconds patience{3};
};

// Starts /proc/self/exe with these arguments once for each rank and returns when all have ended, in
// the order of their ends. Meanwhile SIGINT, SIGTERM, SIGHUP (unless ignored) and SIGUSR1 of this
// process are passed on to all of them, SIGTSTP stops them with this process. They share its streams,
// are process groups of their own, so that a terminal's signals come to them once, and die with this
// thread, by SIGKILL. Throws Error(kIo) if a socket or a process cannot be made; then none is left.
// A process calls this while no other thread of it does.
std::vector<RankEnd> start_ranks(int ranks, const StartOptions& options);

// The end that tells of a failure: of those with no good code the first that a signal has ended, or
// else the first. Null if there is none.
const RankEnd* first_failure(const std::vector<RankEnd>& ends, const StartOptions& options);
// A sentence for that end: what it reported, or `rank 0 (pid 4711) is gone (signal 9, Killed)`, and
// behind it what a survivor said of it.
std::string failure_text(const RankEnd& failure, const std::vector<RankEnd>& ends);

// Whether this process is a rank that start_ranks started. Throws Error(kUsage) if its environment
// says so and its sockets are not there.
bool is_started_rank();
// Tells the parent why this rank fails; the parent prints it, once for all ranks. False if there is
// no parent to tell.
bool report_failure(const std::string& text);

}  // namespace moiety::comm
