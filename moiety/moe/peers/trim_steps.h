// prepare among GPU ranks: which pairs are kept.
#pragma once

#include "moiety/moe/peers/count_steps.h"
#include "moiety/moe/trim.h"

namespace moiety::moe::peers {

// Finds how many pairs of each expert are kept, and where they go (trim.h). Block r does so for the
// experts of rank r.
struct TrimExperts {
  static constexpr int kThreads = 256;
  Control* control;
  PrepareView p;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    const Scratch& at = c.scratch;
    const int r = static_cast<int>(team.block());
    const int32_t* experts = c.map.by_owner_E + c.map.begin_R[r];
    const int64_t n = c.map.count(r), alignment = p.plan.alignment;
    team.each(n, [&](int64_t i) {
      int64_t sum = 0;
      for (int s = 0; s < c.ranks; ++s) {
        at.before_RE[int64_t{s} * c.experts + experts[i]] = static_cast<int32_t>(sum);
        sum += p.plan.count_RE[int64_t{s} * c.experts + experts[i]];
      }
      at.count_E[experts[i]] = sum;
    });
    // The blocks that experts use if none has more than `limit`.
    const auto used = [&](int64_t limit) {
      return team.sum(n, [&](int64_t i) {
        const int64_t blocks = ceil_div(at.count_E[experts[i]], alignment);
        return blocks < limit ? blocks : limit;
      });
    };
    const int64_t room = at.heads_R[r].capacity / alignment, wanted = used(INT64_MAX);
    const BlockLimit most = block_limit(room, wanted, wanted, used);
    place(team, c, r, most.limit, most.rest);
    const int64_t dropped =
        team.sum(n, [&](int64_t i) { return at.count_E[experts[i]] - at.kept_E[experts[i]]; });
    team.one([&] {
      at.required_R[r] = wanted * alignment;
      at.dropped_R[r] = dropped;
      if (dropped > 0) at.largest_R[r] = largest(c, r);
    });
  }

 private:
  // Experts have at most `limit` blocks, and the first `rest` that would have more have one more.
  template <class Team>
  MOIETY_STEP void place(Team& team, const Control& c, int r, int64_t limit, int64_t rest) const {
    const Scratch& at = c.scratch;
    const int64_t alignment = p.plan.alignment, n = c.map.count(r);
    const int32_t* experts = c.map.by_owner_E + c.map.begin_R[r];
    const auto blocks = [&](int64_t i) { return ceil_div(at.count_E[experts[i]], alignment); };
    team.scan(
        n, [&](int64_t i) -> int64_t { return blocks(i) > limit; },
        [&](int64_t i, int64_t longer) {
          const int64_t count = at.count_E[experts[i]];
          const int64_t of = blocks(i) > limit ? limit + (longer < rest) : blocks(i);
          at.kept_E[experts[i]] =
              static_cast<int32_t>(count < of * alignment ? count : of * alignment);
        });
    team.sync();
    team.scan(
        n, [&](int64_t i) { return round_up(at.kept_E[experts[i]], alignment); },
        [&](int64_t i, int64_t before) { at.offset_E[experts[i]] = static_cast<int32_t>(before); });
    team.sync();
  }
  // The first of the experts of rank r with the most pairs.
  MOIETY_STEP int32_t largest(const Control& c, int r) const {
    const int32_t* experts = c.map.by_owner_E + c.map.begin_R[r];
    int32_t out = experts[0];
    for (int i = 1; i < c.map.count(r); ++i) {
      if (c.scratch.count_E[experts[i]] > c.scratch.count_E[out]) out = experts[i];
    }
    return out;
  }
};

}  // namespace moiety::moe::peers
