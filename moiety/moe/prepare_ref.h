// The reference of expert parallelism, which defines its results: it takes the inputs of all ranks
// and returns the outputs of all, in plain loops over pairs (docs/spec/ep.md#plan). It shares only
// the expert map with the code that it is the reference for. This part makes plans; the data
// operations are in dispatch_ref.h and combine_ref.h.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "moiety/moe/expert_map.h"
#include "moiety/moe/prepare.h"

namespace moiety::moe::ref {

template <class T>
using PerRank = std::vector<std::vector<T>>;

struct PlanInput {
  ExpertMap map{1, 1};
  int topk = 1;
  int64_t alignment = 1;
  std::vector<int64_t> capacity;  // capacity in force, by rank
  PerRank<int64_t> idx;           // [T_s, K]
  int64_t peer_rows = 0;          // P; 0 allows all
  int64_t tokens(int s) const { return static_cast<int64_t>(idx[s].size()) / topk; }
};

struct Plan {
  struct Rank {
    std::vector<int64_t> real, padded, before, offset;
    std::array<int64_t, 16> info{};
    std::vector<int32_t> slot_TK, owner_TK, row_TR;
    // The tokens whose rows come here, and their slots here, by source rank.
    PerRank<int32_t> token;                         // [n]
    PerRank<int32_t> slot_K;                        // [n, K]
    std::vector<std::pair<int, int64_t>> slot_row;  // [C] (s, j), s = -1 where there is none
  };
  PlanInput in;
  std::vector<Rank> rank;

  // The slots of a token, by k; -1 where the pair is not alive.
  const int32_t* slots(int s, int64_t t) const { return &rank[s].slot_TK[t * in.topk]; }
  int owner(int s, int64_t t, int k) const {
    return in.map.owner(static_cast<int>(in.idx[s][t * in.topk + k]));
  }
};

// slot_row has rows[r] entries at rank r; without `rows` it is left out.
Plan make_plan(const PlanInput& in, const std::vector<int64_t>& rows = {});

}  // namespace moiety::moe::ref
