// The way in which the ranks of a training are started: by this process, as threads, or by a
// launcher such as mpirun, as processes that find each other through MPI.
#pragma once

#include <string>

#include "apps/moiety/config/options.h"
#include "moiety/base/deadline.h"

namespace moiety::app {

struct Launch {
  bool processes = false;  // ranks are processes, and this one is a rank
  int ranks = 1;           // of processes; those of threads are run.ranks
  int ranks_on_machine = 1;
  std::string launcher;  // the variable that tells of processes, for errors: "WORLD_SIZE = 2"
};

// Looks at the launchers' variables and, if one has started several processes, at MPI, whose start
// waits for all of them no longer than the deadline. Throws UsageError, naming the variable, if
// these processes would not find each other: each would train by itself, in one directory.
Launch find_launch(Seconds deadline);

// Makes the launch and run.ranks agree: that of processes sets the key, threads follow it. Throws
// UsageError if processes were started and run.ranks was given and differs.
void settle_ranks(Launch& launch, Config& config);

}  // namespace moiety::app
