// The plan that moves a batch's tokens, made from its routing (docs/spec/ep.md#plan).
//
// Letters: R ranks, E experts, L experts of this rank, K choices per token, T tokens of this rank
// (uneven over the ranks, may be 0), T_max their declared bound, C capacity in rows, a alignment. A
// pair is a choice k of a token t of a rank s. It is valid if 0 <= idx < E. A negative idx is
// masked (there is no such pair); idx >= E is masked too, and is an error (EpGroup::check(epoch)).
// The same expert twice in one token is two pairs.
//
// The pairs of an expert are ordered by (s, t, k). The first kept_e of them are alive and get the
// slots offset[e] ... of the expert-major output of the owner, so slots depend only on the routing.
// Experts are trimmed only if the owner's capacity is short, the longest first. Every expert's rows
// are padded to a multiple of a.
//
// A row (s, j) at a rank is the one copy of a token of s that it receives; j numbers the tokens of
// s with a valid pair there. Rows to another rank from EpLimits::peer_rows on do not exist: their
// pairs are cut, as if masked, before all of the above, but count as dropped.
#pragma once

#include <cstdint>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/moe/ep_group.h"
#include "moiety/moe/router.h"

namespace moiety::moe {

// The consequence of a short capacity at an owner. In all cases memory stays safe, and dead pairs
// contribute nothing, forward or backward.
enum class OverflowPolicy : uint8_t {
  kError,   // EpGroup::check(epoch) throws, on every rank
  kDrop,    // the info words tell
  kReport,  // as with kDrop, and counted for EpGroup::take_report
};

// Which row and weight every slot of a plan of one rank has (slot_maps.h).
struct SlotMaps {
  TensorView source_C;  // int32 [C]: the token, -1 for padding and the tail
  TensorView slot_w;    // float32 [C]: the bits of w[t, k], 0 without a token
};

struct PrepareArgs {
  TensorView idx_TK;      // int32 or int64 [T, K]; rows may be strided
  int64_t alignment = 1;  // a >= 1; equal on all ranks
  int64_t capacity = 0;   // C >= 0: rows of this rank's expert-major tensors; may differ by rank
  // Optional, int64 [1]: lowers the capacity in force; it is read when the operation runs.
  TensorView capacity_limit = {};
  OverflowPolicy overflow = OverflowPolicy::kError;  // equal on all ranks
  // Optional, in a group of one rank: float32 [T, K], and the maps of slots to be filled with them.
  TensorView w_TK = {};
  SlotMaps maps = {};
  BlockSums statistics = {};  // optional, likewise on a GPU: added beside the plan
};

// The words of EpPlan::info. Words of the group are equal on all ranks.
enum InfoWord : int {
  kInfoPadded = 0,          // rows in use, the sum of rows_padded
  kInfoKept = 1,            // pairs alive here, the sum of rows_real
  kInfoRequired = 2,        // rows without any drop, the sum of ceil(c / a) a
  kInfoDropped = 3,         // pairs dropped here
  kInfoCapacity = 4,        // capacity in force
  kInfoGroupTokens = 5,     // sum of T over the ranks
  kInfoOwnDropped = 6,      // pairs of this rank's tokens dropped or cut anywhere
  kInfoOwnMasked = 7,       // idx < 0 here
  kInfoOwnBad = 8,          // idx >= E here
  kInfoGroupRequired = 9,   // largest required of a rank
  kInfoGroupDropped = 10,   // pairs dropped or cut in the group
  kInfoGroupOverflow = 11,  // 1 if any were
  kInfoLargestRows = 12,    // most rows of one rank for another, before any cut
};

// The plan of one batch: a value with views into the caller's plan memory and a few host integers,
// immutable after `prepare`. Any number of operations may use it in any order, and any number of
// plans may be in flight. Plan memory lives until the plan's last operation has run. Contents
// beyond T, or beyond the rows in use of recv_*, are unspecified.
struct EpPlan {
  Epoch epoch = 0;         // epoch of the prepare: the argument of EpGroup::check
  int rank = 0;            // this rank
  int64_t tokens = 0;      // T
  int64_t tokens_max = 0;  // T_max when the plan was made
  int64_t rows_max = 0;    // rows of one rank for another, at that time
  int topk = 0;            // K
  int64_t capacity = 0;    // C
  int64_t alignment = 1;   // a

  TensorView info;         // int64 [16], see InfoWord
  TensorView rows_real;    // int64 [L] kept_e
  TensorView rows_padded;  // int64 [L] the split sizes of a grouped GEMM
  TensorView rows_before;  // int64 [L] pairs before any drop
  TensorView offset;       // int64 [L + 1] exclusive sum of rows_padded

  // Tables of this rank's tokens.
  TensorView slot_TK;   // int32 [T, K] slot at the expert's owner, -1 if not alive
  TensorView owner_TK;  // int32 [T, K] that owner, -1 if not alive; empty in a group of one rank
  TensorView row_TR;    // int32 [T, R] row of the token at each rank, -1 without a pair alive there
  // Tables of the rows that this rank receives, its own tokens among them.
  TensorView recv_token;  // int32 [R, T_max] token of row (s, j)
  TensorView recv_slot;   // int32 [R, T_max, K] slots of row (s, j), -1 where not alive or not here
  TensorView slot_row;    // int32 [C] row s T_max + j of a slot, -1 for padding and tail
  // Counts of all ranks.
  TensorView count_RE;  // int32 [R, E] valid pairs of a rank for an expert
  TensorView rows_RR;   // int32 [R, R] rows that a rank sends to a rank
  TensorView tokens_R;  // int32 [R]

  // Counts up to the end of each block of 256 tokens: rows sent to each rank, pairs for each
  // expert.
  TensorView row_end_BR;   // int32 [ceil(T_max / 256), R]
  TensorView pair_end_BE;  // int32 [ceil(T_max / 256), E]
};

// The exact bytes of plan memory for these arguments; only K and the capacity of `args` count.
int64_t plan_bytes(const ExpertMap& map, const EpLimits& limits, const PrepareArgs& args);

// Makes the plan of a batch. Collective, and asynchronous in the stream: the plan's tensors are
// valid in stream order. `plan_memory` is uint8 of at least plan_bytes, aligned to 64.
EpPlan prepare(EpGroup& group, const PrepareArgs& args, TensorView plan_memory, Stream stream);

// Rows that always suffice at a rank of `local_experts`, even if every token of the group picks its
// experts. `repeats` says that a token may choose the same expert more than once.
int64_t worst_capacity(int ranks, int64_t tokens_max, int topk, int local_experts,
                       int64_t alignment, bool repeats = false);
// Rows for `factor` times the balanced load, a multiple of the alignment.
int64_t capacity_for(double factor, int64_t group_tokens, int topk, int ranks, int local_experts,
                     int64_t alignment);

}  // namespace moiety::moe
