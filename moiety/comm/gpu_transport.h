// What carries the operations of ranks on GPUs: memory that they map (mapped/), or NCCL (nccl/). The
// results are the same bits.
#pragma once

#include <cstdint>
#include <string>

#include "moiety/base/device.h"
#include "moiety/comm/communicator.h"

namespace moiety::comm {

// kAuto: memory where the ranks of a communicator can map each other's, else NCCL.
enum class GpuTransport { kAuto, kMapped, kNccl };

// Whether NCCL can be used: the sentence that `moiety doctor` prints says which one, and where, or
// what is missing.
struct NcclStatus {
  bool available = false;
  std::string text;
};
NcclStatus nccl_status();

// Bytes of a rank's GPU that a communicator of several ranks takes when it is prepared and NCCL
// carries its operations: staging, and what NCCL took of an H200 for two ranks. The others of a
// process, split from its `first` one, share much of that.
int64_t nccl_link_bytes(int ranks, bool first, const GpuLinkOptions& options = {});

// Whether operations on a GPU, for which the communicator has been prepared, use memory that its ranks
// map, so that buffers can be attached.
bool maps_gpu_memory(const Communicator& comm);

// Throws DeviceError, the same on all ranks, if two of them would compute on one GPU: "ranks 0 and 1
// would share GPU-5f2c... (cuda:0): ...". Collective.
void check_own_gpus(Bootstrap& bootstrap, Device gpu);

// The number of the calling rank among those of its host. Collective.
int rank_on_host(Bootstrap& bootstrap);

}  // namespace moiety::comm
