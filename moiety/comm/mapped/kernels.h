// The kernels that the steps of an operation are made of (plan.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "moiety/base/stream.h"
#include "moiety/comm/mapped/call_word.h"
#include "moiety/comm/mapped/plan.h"

namespace moiety::comm::mapped {

// Host memory that kernels reach.
struct FaultPage {
  uint64_t found;  // 1 when `fault` is there
  Fault fault;
  uint64_t abort;  // the host stores 1 to end all waits
};

// What every kernel knows. The ranks' memory begins at base + rank * stride.
struct Region {
  std::byte* base;
  int64_t stride;
  int rank, ranks;
  Places places;
  Control* control;
  FaultPage* page;
  uint64_t deadline_ns;
};

// The call as each peer must see it.
struct Meeting {
  Peers peers;
  uint32_t first;  // 1: it opens an operation
  PairCall call;
  int64_t up[kMaxRanks], down[kMaxRanks];  // PairCall's, by peer
};

// A kernel of one warp: tells the peers, waits for them.
void meet(const Region& region, const Meeting& meeting, const Stream& stream);
// to[i] := op over the sources. At most `blocks` blocks, 0 for as many short ones as it takes.
void sum(const SumStep& step, DType dtype, ReduceOp op, int blocks, const Stream& stream);
// Copies with all multiprocessors what copies_by_kernel says: where nothing runs beside it that is
// faster than a copy engine, which takes some microseconds to begin.
bool copies_by_kernel(const CopyStep& copy);
void copy_by_kernel(const CopyStep& copy, const Stream& stream);
// Whether all operands lie at multiples of 16 bytes.
bool sums_wide(const SumStep& step);
// The same between two meetings, as one kernel of at most `blocks` blocks: it meets the peers, copies
// (steps of joins_copy, at most kMostMoves, none of what another one has written) or sums (a step of
// joins_sum), and with `leave` meets them again. Copies are joined if they are so short that kernels'
// beginnings count: more blocks, or copy engines, carry more.
bool joins_copy(const CopyStep& copy);
bool joins_sum(const SumStep& step);
inline constexpr int kMostMoves = kMaxRanks;
void join_copies(const Region& region, const Meeting& meeting, std::span<const Step> copies,
                 bool leave, int blocks, const Stream& stream);
void join_sum(const Region& region, const Meeting& meeting, const SumStep& step, DType dtype,
              ReduceOp op, bool leave, int blocks, const Stream& stream);
// A kernel of one block: pushes, meets, sums or copies.
void exchange_small(const Region& region, const Meeting& meeting, const SmallStep& step,
                    DType dtype, ReduceOp op, const Stream& stream);
// Loads all of them, so that none is loaded while another one waits.
void load_kernels(int device);

}  // namespace moiety::comm::mapped
