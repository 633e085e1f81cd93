// Reads checkpoints, under any layout. Elements are moved, never changed.
#pragma once

#include <string>

#include "moiety/checkpoint/manifest.h"
#include "moiety/comm/bootstrap.h"

namespace moiety::checkpoint {

struct LoadOptions {
  bool weights_only = false;  // the checkpoint's other slots are not asked for
  bool digests = true;        // compute the digests of what was loaded and compare
};

// Collective: fills the boxes of `view` from the checkpoint at rank 0's `path`. Tensors and slots
// of the checkpoint and of all ranks' views must be the same, with equal shapes and types; what is
// missing, unexpected or different is listed. Several ranks may ask for the same elements, if all
// elements of the tensor are asked for equally often. Memory is touched only after all checks that
// need no data. Then crc32c of every piece read and, over all ranks, the digests of what arrived
// are compared. If one rank fails, all throw the same CheckpointError or Error(Io). Memory on a GPU
// is filled when this returns; nothing else may be under way on it.
RunState load(const std::string& path, const StateView& view, const LoadOptions& options,
              comm::Bootstrap& bootstrap, FileSystem& files = posix());

}  // namespace moiety::checkpoint
