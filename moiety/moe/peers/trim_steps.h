// prepare among GPU ranks: which pairs are kept.
#pragma once

#include "moiety/moe/peers/number_steps.h"
#include "moiety/moe/trim.h"

namespace moiety::moe::peers {

// Finds how many pairs of each expert are kept, and where they go (trim.h). A warp does so for the
// experts of a rank. A part of a step of one block, whose memory holds what trim_bytes says.
constexpr int64_t trim_bytes(int64_t experts) { return 8 * experts; }
struct TrimExperts {
  PrepareView p;

  // The team meets behind it.
  template <class Team>
  MOIETY_STEP void operator()(Team& team, Control& c) const {
    const Scratch& at = c.scratch;
    auto* count_I = team.template shared<int32_t>(0);  // in the order of by_owner_E
    auto* kept_I = count_I + c.experts;
    team.sync();
    team.each(c.experts, [&](int64_t i) {
      const int e = c.map.by_owner_E[i];
      int32_t sum = 0;
      for (int s = 0; s < c.ranks; ++s) {
        at.before_RE[int64_t{s} * c.experts + e] = sum;
        sum += p.plan.count_RE[int64_t{s} * c.experts + e];
      }
      count_I[i] = sum;
      at.count_E[e] = sum;
    });
    team.one([&] { at.trims->own_dropped = 0; });
    team.sync();
    team.each_warp(c.ranks, [&](auto& warp, int64_t r) {
      trim(warp, c, static_cast<int>(r), count_I + c.map.begin_R[r], kept_I + c.map.begin_R[r]);
    });
    team.sync();
  }

 private:
  MOIETY_STEP static int32_t blocks_of(int32_t rows, int32_t alignment) {
    const auto of = static_cast<uint32_t>(alignment);
    return static_cast<int32_t>((static_cast<uint32_t>(rows) + of - 1) / of);
  }
  template <class Warp>
  MOIETY_STEP void trim(Warp& warp, const Control& c, int r, const int32_t* count_I,
                        int32_t* kept_I) const {
    const Scratch& at = c.scratch;
    const int32_t* experts = c.map.by_owner_E + c.map.begin_R[r];
    const int n = c.map.count(r);
    const auto alignment = static_cast<int32_t>(p.plan.alignment);
    const auto none = [](int64_t, int32_t) {};
    const auto blocks = [&](int64_t i) { return blocks_of(count_I[i], alignment); };
    // The blocks that experts use if none has more than `limit`.
    const auto used = [&](int64_t limit) -> int64_t {
      return warp.prefix(
          n, [&](int64_t i) { return blocks(i) < limit ? blocks(i) : static_cast<int32_t>(limit); },
          none);
    };
    const int64_t room = at.heads_R[r].capacity / alignment, wanted = used(INT32_MAX);
    const BlockLimit most = block_limit(room, wanted, wanted, used);
    // The first `rest` of the experts that would have more blocks than `limit` have one more.
    warp.prefix(
        n, [&](int64_t i) { return int32_t{blocks(i) > most.limit}; },
        [&](int64_t i, int32_t longer) {
          const int64_t of =
              blocks(i) > most.limit ? most.limit + (longer <= most.rest) : blocks(i);
          const int64_t rows = of * alignment;
          kept_I[i] = rows < count_I[i] ? static_cast<int32_t>(rows) : count_I[i];
        });
    warp.sync();
    const int64_t padded =
        alignment * int64_t{warp.prefix(
                        n, [&](int64_t i) { return blocks_of(kept_I[i], alignment); },
                        [&](int64_t i, int32_t upto) {
                          const int32_t before = upto - blocks_of(kept_I[i], alignment);
                          at.offset_E[experts[i]] = before * alignment;
                          at.kept_E[experts[i]] = kept_I[i];
                        })};
    const int64_t kept = warp.prefix(
        n, [&](int64_t i) { return kept_I[i]; }, none);
    const int64_t dropped = warp.prefix(
                                n, [&](int64_t i) { return count_I[i]; }, none) -
                            kept;
    warp.one([&] {
      at.required_R[r] = wanted * alignment;
      at.dropped_R[r] = dropped;
      if (r != c.rank) return;
      at.trims->padded = padded;
      at.trims->kept = kept;
    });
    if (dropped > 0) tell_dropped(warp, c, r, count_I, kept_I);
  }

  // What is told of a rank that drops pairs: the first of its experts with the most, and how many
  // pairs of this rank are dropped there.
  template <class Warp>
  MOIETY_STEP void tell_dropped(Warp& warp, const Control& c, int r, const int32_t* count_I,
                                const int32_t* kept_I) const {
    const Scratch& at = c.scratch;
    const int32_t* experts = c.map.by_owner_E + c.map.begin_R[r];
    const int32_t own = warp.prefix(
        c.map.count(r),
        [&](int64_t i) {
          const int64_t of = int64_t{c.rank} * c.experts + experts[i];
          const int32_t pairs = p.plan.count_RE[of], alive = kept_I[i] - at.before_RE[of];
          return pairs - (alive < 0 ? 0 : alive < pairs ? alive : pairs);
        },
        [](int64_t, int32_t) {});
    warp.one([&] {
      int most = 0;
      for (int i = 1; i < c.map.count(r); ++i) {
        if (count_I[i] > count_I[most]) most = i;
      }
      at.largest_R[r] = experts[most];
      add(&at.trims->own_dropped, static_cast<unsigned long long>(own));
    });
  }
};

}  // namespace moiety::moe::peers
