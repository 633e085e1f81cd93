// The way in which the ranks of a training are started: by this process, as threads or as processes
// that sockets connect, or by a launcher such as mpirun, as processes that find each other through
// MPI.
#pragma once

#include <string>
#include <vector>

#include "apps/moiety/config/options.h"
#include "moiety/base/deadline.h"

namespace moiety::app {

struct Launch {
  bool processes = false;  // ranks are processes, and this one is a rank
  int ranks = 1;           // of processes; those of threads are run.ranks
  int ranks_on_machine = 1;
  // What tells of processes, for errors: "WORLD_SIZE = 2"; empty where this program started them.
  std::string launcher;
};

// Sets what several ranks on GPUs need of CUDA, if the run may have them. To be called before
// anything touches CUDA, as MPI may when it starts.
void prepare_gpus(const Options& options);

// Looks at the launchers' variables and, if one has started several processes, at MPI, whose start
// waits for all of them no longer than the deadline. Throws UsageError, naming the variable, if
// these processes would not find each other: each would train by itself, in one directory.
Launch find_launch(Seconds deadline);

// Makes the launch and run.ranks agree: that of a launcher sets the key, others follow it. Throws
// UsageError if a launcher started processes and run.ranks was given and differs, or run.launch
// wants threads.
void settle_ranks(Launch& launch, Config& config);

// Whether this process, which no launcher started, is to start its ranks as processes (run.launch).
bool starts_processes(const Options& options);
// Starts the ranks with these arguments of the program, waits for them, and prints the failure, if
// there is one. Returns their exit code: that of the first that failed, kExitComm if one has died.
int run_processes(int ranks, const std::vector<std::string>& arguments);

}  // namespace moiety::app
