// What of the rows that come to experts among GPU ranks is zero behind all of them: the places of a
// map (slot_maps.h) that no row has, and the rows that a layout of scales adds (payload.h).
#pragma once

#include "moiety/moe/peers/copy_steps.h"

namespace moiety::moe::peers {

// The number of places that rows have by a map: one more than that of the last row with a live
// pair. Every block finds it.
template <class Team>
MOIETY_STEP int64_t mapped_end(Team& team, const PlanView& plan, const int32_t* source) {
  constexpr int64_t kTogether = 256;
  const auto slot_of = [&](int s, int64_t j) -> int64_t {
    const int32_t* slot_K = plan.slots(s, j);
    for (int k = 0; k < plan.topk; ++k) {
      if (slot_K[k] >= 0) return slot_K[k];
    }
    return -1;
  };
  for (int s = plan.ranks - 1; s >= 0; --s) {
    for (int64_t end = plan.rows(s, plan.rank); end > 0; end -= kTogether) {
      const int64_t begin = end < kTogether ? 0 : end - kTogether;
      const int64_t alive =
          team.sum(end - begin, [&](int64_t i) -> int64_t { return slot_of(s, begin + i) >= 0; });
      if (alive == 0) continue;
      int64_t j = end - 1;
      while (slot_of(s, j) < 0) --j;
      return source[slot_of(s, j)] + 1;
    }
  }
  return 0;
}

// Zeroes what lies behind the rows that came.
struct ZeroPlaces {
  static constexpr int kThreads = 256, kBlocks = 1;
  Control* control;
  PlanView plan;
  CopyRows rows;
  int64_t places;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    if (failed(team, *control)) return;
    const int64_t end = rows.source ? mapped_end(team, plan, rows.source) : places;
    const int64_t pieces = rows.pieces();
    team.grid_warps((places - end) * pieces, [&](auto& warp, int64_t i) {
      const Split split(i, pieces);
      zero_piece(warp, rows, end + split.item, split.rest);
    });
    team.grid_warps(rows.words.pads(), [&](auto& warp, int64_t i) {
      rows.words.put(warp, rows.words.rows + i, nullptr);
    });
  }
};

}  // namespace moiety::moe::peers
