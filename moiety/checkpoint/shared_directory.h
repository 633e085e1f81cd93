// Ranks of a run write into one directory: whether it is the same for all of them.
#pragma once

#include <string>

#include "moiety/checkpoint/file_system.h"
#include "moiety/comm/bootstrap.h"

namespace moiety::checkpoint {

// Collective. Throws Error(Io), the same on all ranks and naming the first of them, unless what
// rank 0 writes into `directory` is seen by all.
void check_shared_directory(const std::string& directory, comm::Bootstrap& bootstrap,
                            FileSystem& files = posix());

}  // namespace moiety::checkpoint
