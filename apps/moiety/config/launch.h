// The way in which the ranks of a training are started: by this process, as threads, or by a
// launcher such as mpirun, as processes that find each other through MPI.
#pragma once

#include <string>

#include "apps/moiety/config/options.h"

namespace moiety::app {

struct Launch {
  bool processes = false;  // ranks are processes, and this one is a rank
  int ranks = 1;
  int ranks_on_machine = 1;
};

// Looks at the launchers' variables and, if one has started several processes, at MPI. From then on
// run.ranks of `config` is the number of ranks. Throws UsageError, naming the variable, if these
// processes would not find each other (each would train by itself, in one directory), or if
// run.ranks was given and differs.
Launch find_launch(Config& config);

}  // namespace moiety::app
