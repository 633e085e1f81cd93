// The table of comm/mpi/functions.h over sockets, for a process that start_ranks started.
#pragma once

#include "moiety/comm/mpi/functions.h"

namespace moiety::comm::local {

const mpi::Functions& socket_functions();

}  // namespace moiety::comm::local
