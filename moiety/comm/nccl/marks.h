// What the GPU tells of the operations over NCCL, which say nothing by themselves: where a rank stands
// and what its peers do, in memory that the host reads; and the kernels that tell it. In a graph too,
// as the counts are the GPU's own.
//
// An operation opens, which counts it and writes a post for each peer; the posts travel through NCCL;
// they are compared; the operation's steps follow; it closes. A post is there as soon as its sender
// has come to the operation, so the host knows who is late, and what else a peer does.
#pragma once

#include <cstdint>

#include "moiety/base/stream.h"
#include "moiety/comm/mapped/kernels.h"

namespace moiety::comm::nccl {

using mapped::FaultKind;
using mapped::kMaxRanks;
using mapped::PairCall;
using mapped::Post;

// Host memory that kernels and NCCL write; zero at first.
struct Page {
  uint64_t started, closed;  // operations
  uint64_t found;            // 1 + a peer whose post does not fit
  Post mine[kMaxRanks];      // of the operation that started last, by peer
  Post theirs[kMaxRanks];    // that came last
};

// What the kernels know. `outbox`, the posts that NCCL sends, and the count are the rank's own.
struct Desk {
  Page* page;
  Post* outbox;
  uint64_t* count;
  int rank, ranks;
};

// In the order of the stream, which is a GPU's.
void open_on_gpu(const Desk& desk, const mapped::Meeting& meeting, const Stream& stream);
void compare_on_gpu(const Desk& desk, const Stream& stream);
void close_on_gpu(const Desk& desk, const Stream& stream);
void load_mark_kernels();
// Whether a graph captures the GPU's stream.
bool in_capture(const Stream& stream);

}  // namespace moiety::comm::nccl
