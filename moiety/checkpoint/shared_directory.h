// A check that all ranks of a run see one directory.
#pragma once

#include <string>

#include "moiety/checkpoint/file_system.h"
#include "moiety/comm/bootstrap.h"

namespace moiety::checkpoint {

// Throws Error(kIo), the same on all ranks and naming the first rank concerned, unless all ranks
// see what rank 0 writes into `directory`. Collective.
void check_shared_directory(const std::string& directory, comm::Bootstrap& bootstrap,
                            FileSystem& files = posix());

}  // namespace moiety::checkpoint
