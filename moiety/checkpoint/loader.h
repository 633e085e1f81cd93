// The loading of checkpoints, under any layout. Elements are moved, never changed.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "moiety/checkpoint/manifest.h"
#include "moiety/comm/bootstrap.h"

namespace moiety::checkpoint {

struct LoadOptions {
  // Which slots of the checkpoint need not be asked for; none if there is no function.
  std::function<bool(std::string_view slot)> may_leave = {};
  bool digests = true;  // compute the digests of the loaded tensors and compare
};
// For readers of weights alone.
inline bool is_no_weight(std::string_view slot) { return slot != "weight"; }

// Fills the boxes of `view` from the checkpoint at rank 0's `path`. Collective.
//
// Tensors and slots of the checkpoint and of all ranks' views must be the same, with equal shapes
// and types; the error lists those that are missing, unexpected or different. Several ranks may ask
// for the same elements, if all elements of the tensor are asked for equally often. Memory is
// touched only after all checks that need no data. Then the crc32c of every piece read is compared
// and, over all ranks, the digests of the tensors that arrived.
//
// If one rank fails, all throw the same CheckpointError or Error(kIo). Memory on a GPU is filled
// when this returns; no other work may be under way on it.
RunState load(const std::string& path, const StateView& view, const LoadOptions& options,
              comm::Bootstrap& bootstrap, FileSystem& files = posix());

}  // namespace moiety::checkpoint
