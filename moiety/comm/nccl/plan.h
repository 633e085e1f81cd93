// A collective operation as the steps of one rank over NCCL: bytes that travel, and sums of what has
// come, in the order of one stream. Plain data about addresses, as mapped/plan.h is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "moiety/comm/collective.h"
#include "moiety/comm/mapped/plan.h"

namespace moiety::comm::nccl {

struct PlanInput {
  int rank = 0, ranks = 1;
  std::byte* staging = nullptr;  // aligned to 256, at least 4 KiB for each rank
  int64_t staging_bytes = 0;
};

struct Piece {
  std::byte* data = nullptr;
  int64_t bytes = 0;  // 0: nothing travels
};

struct Step {
  enum class Kind { kExchange, kGather, kBroadcast, kCopy, kSum };
  Kind kind = Kind::kExchange;
  std::vector<Piece> sends, receives;  // kExchange: by peer
  // kGather: `own` of every rank to `all`; kBroadcast: `all` of `root`; kCopy: from own to all.
  Piece own, all;
  int root = 0;
  mapped::SumStep sum{};
};

// The steps of the call. All ranks send and receive in the same order. Sums are taken in rank order,
// so their bits are those of every other transport.
std::vector<Step> plan(const CollectiveCall& call, const PlanInput& input);

}  // namespace moiety::comm::nccl
