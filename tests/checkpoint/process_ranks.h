// Ranks that are processes, forked from the test, with a bootstrap over shared memory.
#pragma once

#include <functional>
#include <vector>

#include "moiety/comm/bootstrap.h"

namespace moiety::checkpoint {

// Runs body(bootstrap) in `ranks` processes and waits for them. The results are by rank: 0 if the
// body returned, 1 if it threw (the text goes to stderr if `loud`), minus the signal that killed
// the rank, whose peers' waits then end. Loops in the bodies are serial: threads of the parent do
// not exist in them.
std::vector<int> run_process_ranks(int ranks, Seconds deadline,
                                   const std::function<void(comm::Bootstrap&)>& body,
                                   bool loud = true);

}  // namespace moiety::checkpoint
