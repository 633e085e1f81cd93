// What carries the operations of ranks on GPUs: memory that they map (mapped/), or NCCL (nccl/). The
// results are the same bits.
#pragma once

#include <cstdint>
#include <string>

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

// Bytes of a rank's GPU that a communicator of so many ranks takes when it is prepared and NCCL
// carries its operations: staging, and what NCCL itself took where it was measured (docs/gpu.md).
int64_t nccl_link_bytes(int ranks, const GpuLinkOptions& options = {});

// The number of the calling rank among those of its host. Collective.
int rank_on_host(Bootstrap& bootstrap);

}  // namespace moiety::comm
