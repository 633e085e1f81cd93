// prepare among GPU ranks: which pairs are kept.
#pragma once

#include "moiety/moe/peers/number_steps.h"
#include "moiety/moe/trim.h"

namespace moiety::moe::peers {

// Finds how many pairs of each expert are kept, and where they go (trim.h). A warp does so for the
// experts of a rank. A part of a step of one block, whose memory holds what trim_bytes says.
constexpr int64_t trim_bytes(int64_t experts) { return 16 * experts; }
struct TrimExperts {
  PrepareView p;

  // `beside` is called while a few of the first warps trim. The team meets behind it.
  template <class Team, class Beside>
  MOIETY_STEP void operator()(Team& team, Control& c, Beside&& beside) const {
    const Scratch at = c.scratch;
    const int experts = c.experts, ranks = c.ranks;
    const int32_t *by_owner_E = c.map.by_owner_E, *begin_R = c.map.begin_R;
    auto* count_I = team.template shared<int32_t>(0);  // in the order of by_owner_E
    auto* kept_I = count_I + experts;
    auto* offset_I = kept_I + experts;
    auto* blocks_I = offset_I + experts;
    team.sync();
    team.each(experts, [&](int64_t i) {
      const int e = by_owner_E[i];
      constexpr int kTogether = 4;  // counts that wait for memory together
      int32_t sum = 0;
      for (int first = 0; first < ranks; first += kTogether) {
        int32_t count[kTogether] = {};
        MOIETY_UNROLL
        for (int s = 0; s < kTogether; ++s) {
          if (first + s < ranks) count[s] = p.plan.count_RE[int64_t{first + s} * experts + e];
        }
        MOIETY_UNROLL
        for (int s = 0; s < kTogether; ++s) {
          if (first + s < ranks) at.before_RE[int64_t{first + s} * experts + e] = sum;
          sum += count[s];
        }
      }
      count_I[i] = kept_I[i] = sum;
      blocks_I[i] = blocks_of(sum);
    });
    on_last(team, [&] {
      unsigned long long cut = 0;
      for (int r = 0; r < ranks; ++r) cut += static_cast<unsigned>(at.heads_R[r].cut);
      at.trims->own_dropped = 0;
      at.trims->dropped = cut;
    });
    team.sync();
    team.each_warp(ranks, [&](auto& warp, int64_t r) {
      const int begin = begin_R[r];
      trim(warp, c, static_cast<int>(r), count_I + begin, kept_I + begin, offset_I + begin,
           blocks_I + begin);
    });
    beside();
    team.sync();
    const int first = begin_R[c.rank], end = begin_R[c.rank + 1];
    team.each(experts, [&](int64_t i) {
      const int e = by_owner_E[i];
      at.count_E[e] = count_I[i];
      at.kept_E[e] = kept_I[i];
      at.offset_E[e] = offset_I[i];
      if (i < first || i >= end) return;
      p.plan.rows_before[i - first] = count_I[i];
      p.plan.rows_real[i - first] = kept_I[i];
      p.plan.rows_padded[i - first] = round_up(kept_I[i], p.plan.alignment);
      p.plan.offset[i - first] = offset_I[i];
    });
    team.sync();
  }

 private:
  MOIETY_STEP int32_t blocks_of(int32_t rows) const {
    return static_cast<int32_t>(Split(rows + p.plan.alignment - 1, p.plan.alignment).item);
  }
  // Everything is kept so far, in these blocks.
  template <class Warp>
  MOIETY_STEP void trim(Warp& warp, const Control& c, int r, const int32_t* count_I,
                        int32_t* kept_I, int32_t* offset_I, int32_t* blocks_I) const {
    const Scratch& at = c.scratch;
    const int64_t alignment = p.plan.alignment;
    const int64_t room = Split(at.heads_R[r].capacity, alignment).item;
    const int n = c.map.count(r);
    const int64_t wanted = warp.sum(n, [&](int64_t i) { return blocks_I[i]; });
    if (wanted > room) cut(warp, n, room, wanted, kept_I, blocks_I);
    const int64_t padded =
        alignment * int64_t{warp.prefix(
                        n, [&](int64_t i) { return blocks_I[i]; },
                        [&](int64_t i, int32_t upto) {
                          offset_I[i] = static_cast<int32_t>((upto - blocks_I[i]) * alignment);
                        })};
    const int64_t kept = warp.sum(n, [&](int64_t i) { return kept_I[i]; });
    const int64_t dropped =
        wanted > room ? warp.sum(n, [&](int64_t i) { return count_I[i]; }) - kept : 0;
    warp.one([&] {
      at.required_R[r] = wanted * alignment;
      at.dropped_R[r] = dropped;
      if (dropped > 0) add(&at.trims->dropped, static_cast<unsigned long long>(dropped));
      if (r != c.rank) return;
      at.trims->padded = padded;
      at.trims->kept = kept;
    });
    if (dropped > 0) tell_dropped(warp, c, r, count_I, kept_I);
  }
  // Leaves no more blocks than there is room for.
  template <class Warp>
  MOIETY_STEP void cut(Warp& warp, int n, int64_t room, int64_t wanted, int32_t* kept_I,
                       int32_t* blocks_I) const {
    // The blocks that experts use if none has more than `limit`.
    const auto used = [&](int64_t limit) -> int64_t {
      return warp.sum(n, [&](int64_t i) {
        return blocks_I[i] < limit ? blocks_I[i] : static_cast<int32_t>(limit);
      });
    };
    const BlockLimit most = block_limit(room, wanted, wanted, used);
    // The first `rest` of the experts that would have more blocks than `limit` have one more.
    warp.prefix(
        n, [&](int64_t i) { return int32_t{blocks_I[i] > most.limit}; },
        [&](int64_t i, int32_t longer) {
          const int64_t of =
              blocks_I[i] > most.limit ? most.limit + (longer <= most.rest) : blocks_I[i];
          const int64_t rows = of * p.plan.alignment;
          if (rows < kept_I[i]) kept_I[i] = static_cast<int32_t>(rows);
          blocks_I[i] = static_cast<int32_t>(of);
        });
    warp.sync();
  }

  // What is told of a rank that drops pairs: the first of its experts with the most, and how many
  // pairs of this rank are dropped there.
  template <class Warp>
  MOIETY_STEP void tell_dropped(Warp& warp, const Control& c, int r, const int32_t* count_I,
                                const int32_t* kept_I) const {
    const Scratch& at = c.scratch;
    const int32_t* experts = c.map.by_owner_E + c.map.begin_R[r];
    const int32_t own = warp.sum(c.map.count(r), [&](int64_t i) {
      const int64_t of = int64_t{c.rank} * c.experts + experts[i];
      const int32_t pairs = p.plan.count_RE[of], alive = kept_I[i] - at.before_RE[of];
      return pairs - (alive < 0 ? 0 : alive < pairs ? alive : pairs);
    });
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
