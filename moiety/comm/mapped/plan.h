// A collective operation as the steps of one rank: meetings with its peers, copies and sums between
// them, in the order of a stream. No step moves a byte that a meeting has not made safe, so the
// order of meetings is all that the ranks need.
//
// It is plain data about addresses: what enqueues it on a GPU (link_cuda.cpp) and what proves its
// order on a CPU (tests/comm/mapped_plan_test.cpp) read the same steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "moiety/comm/collective.h"
#include "moiety/comm/mapped/call_word.h"

namespace moiety::comm::mapped {

// Where the parts of each rank's memory lie, for `ranks` ranks and these options.
Places places_of(int ranks, const GpuLinkOptions& options);

// An operand that peers read where it lies: its address on each rank. `place` names it in
// signatures.
struct Direct {
  int64_t place = 0;
  std::vector<std::byte*> at;
};

struct PlanInput {
  int rank = 0;
  std::span<std::byte* const> memory;  // of each rank, with the Places
  Places places;
  // The tensor that peers read (`send`; of an all_gather in place, `recv`), if it is direct.
  const Direct* direct = nullptr;
};

// Ranks are bits: peer r is bit r.
using Peers = uint64_t;

// Rows of bytes; a single one is a plain copy.
struct CopyStep {
  std::byte* to;
  const std::byte* from;
  int64_t bytes, to_pitch, from_pitch, rows;
};
// to[i] := op over the sources, in their order; the same at every other place.
struct SumStep {
  std::byte* to;
  std::vector<const std::byte*> sources;
  int64_t elements;
  bool beside = false;                // the copies behind it have nothing to do with it
  std::vector<std::byte*> also = {};  // at peers
};
// Operands of a small operation: pushes out to each peer, meets them, and sums or copies what they
// have pushed. `bytes` are at most Places::small.
struct SmallStep {
  struct Peer {
    const std::byte* send = nullptr;
    int64_t send_bytes = 0;
    std::byte* recv = nullptr;  // null where it sums
    int64_t recv_bytes = 0;
  };
  std::vector<Peer> peers;  // by rank; the own one is a copy, or its part of the sum
  std::byte* sum = nullptr;
  int64_t elements = 0;
};

struct Step {
  enum class Kind { kMeet, kCopy, kSum, kSmall };
  Kind kind = Kind::kMeet;
  Peers peers = 0;  // that kMeet and kSmall meet
  CopyStep copy{};
  SumStep sum{};
  SmallStep small{};
};

// The steps of the call, whose send is on `input.rank`. All ranks meet in the same order.
std::vector<Step> plan(const CollectiveCall& call, const PlanInput& input);

}  // namespace moiety::comm::mapped
