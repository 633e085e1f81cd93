// prepare among GPU ranks: which pairs are kept.
#pragma once

#include "moiety/moe/peers/count_steps.h"
#include "moiety/moe/trim.h"

namespace moiety::moe::peers {

// Finds how many pairs of each expert are kept, and where they go (trim.h), a warp for the experts of
// each rank. Sums are below 2^31 as pairs and rows of a rank are.
struct TrimExperts {
  const PrepareView& p;

  template <class Team>
  MOIETY_STEP void operator()(Team& team, const Control& c) const {
    team.each(c.experts, [&](int64_t e) {
      int64_t sum = 0;
      for (int s = 0; s < c.ranks; ++s) {
        c.scratch.before_RE[int64_t{s} * c.experts + e] = static_cast<int32_t>(sum);
        sum += p.plan.count_RE[int64_t{s} * c.experts + e];
      }
      c.scratch.count_E[e] = sum;
    });
    team.sync();
    team.each_warp(c.ranks,
                   [&](auto& warp, int64_t r) { trim_rank(warp, c, static_cast<int>(r)); });
  }

 private:
  template <class Warp>
  MOIETY_STEP void trim_rank(Warp& warp, const Control& c, int r) const {
    const Scratch& at = c.scratch;
    const int32_t* experts = c.map.by_owner_E + c.map.begin_R[r];
    const int64_t n = c.map.count(r), alignment = p.plan.alignment;
    const auto blocks = [&](int64_t i) { return ceil_div(at.count_E[experts[i]], alignment); };
    const auto sum = [&](auto&& f) -> int64_t {
      return warp.prefix(
          n, [&](int64_t i) { return static_cast<int32_t>(f(i)); }, [](int64_t, int32_t) {});
    };
    const auto used = [&](int64_t limit) {
      return sum([&](int64_t i) { return blocks(i) < limit ? blocks(i) : limit; });
    };
    const int64_t room = at.heads_R[r].capacity / alignment, wanted = used(INT64_MAX);
    const BlockLimit most = block_limit(room, wanted, wanted, used);
    warp.prefix(
        n, [&](int64_t i) -> int32_t { return blocks(i) > most.limit; },
        [&](int64_t i, int32_t longer) {
          const int64_t count = at.count_E[experts[i]];
          const int64_t of =
              blocks(i) > most.limit ? most.limit + (longer <= most.rest) : blocks(i);
          at.kept_E[experts[i]] =
              static_cast<int32_t>(count < of * alignment ? count : of * alignment);
        });
    warp.sync();
    warp.prefix(
        n,
        [&](int64_t i) { return static_cast<int32_t>(round_up(at.kept_E[experts[i]], alignment)); },
        [&](int64_t i, int32_t end) {
          at.offset_E[experts[i]] =
              end - static_cast<int32_t>(round_up(at.kept_E[experts[i]], alignment));
        });
    const int64_t dropped =
        sum([&](int64_t i) { return at.count_E[experts[i]] - at.kept_E[experts[i]]; });
    warp.one([&] {
      at.required_R[r] = wanted * alignment;
      at.dropped_R[r] = dropped;
      if (dropped > 0) at.largest_R[r] = largest(c, r);
    });
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
