// prepare among GPU ranks begins with counts of rows and pairs. Their order is that of the CPU
// (prepare_cpu.cpp): numbers are those of the tokens' order, so none depends on which thread comes
// first.
#pragma once

#include "moiety/moe/peers/meet_steps.h"

namespace moiety::moe::peers {

struct PrepareView {
  PlanView plan;
  const void* idx;
  int64_t idx_stride, idx_step;
  const int64_t* limit;  // may be null
  Epoch epoch;           // of the plan, for findings
  OverflowPolicy overflow;
  bool wide;

  MOIETY_HD_INLINE int64_t index(int64_t t, int64_t k) const {
    const int64_t at = t * idx_stride + k * idx_step;
    return wide ? static_cast<const int64_t*>(idx)[at] : static_cast<const int32_t*>(idx)[at];
  }
  // The expert of a pair; -1 if the pair is not valid.
  MOIETY_HD_INLINE int expert(const Control& c, int64_t t, int64_t k) const {
    const int64_t e = index(t, k);
    return e >= 0 && e < c.experts ? static_cast<int>(e) : -1;
  }
  MOIETY_HD_INLINE int64_t tokens_of(int64_t block) const {
    const int64_t left = plan.tokens - block * kTokenBlock;
    return left < kTokenBlock ? left : kTokenBlock;
  }
  // Whether there may be more rows for a rank than it has room for.
  MOIETY_HD_INLINE bool may_cut() const { return plan.rows_max < plan.tokens; }
  // The most rows that there may be for rank r.
  MOIETY_HD_INLINE int64_t most_rows(const Control& c, int r) const {
    return r == c.rank ? plan.tokens_max : plan.rows_max;
  }
};

using Ranks = unsigned long long;  // a bit for each
static_assert(kMostMappedRanks <= 64);

// A team's memory in the steps below: the ranks of each token of a block, then counts of experts.
constexpr int64_t shared_counts(int64_t experts) { return 8 * kTokenBlock + 4 * experts; }

// Fills the ranks of a block's tokens, of which each has a bit for each rank that it has a pair of,
// and calls use(pair of the block, its expert, or what there is in place of one). A thread has a
// pair, so that all wait for memory together; `beside` is called when they have begun. The team meets
// behind it.
template <class Team, class Use, class Beside>
MOIETY_STEP void find_pairs(Team& team, const Control& c, const PrepareView& p, int64_t b,
                            Use&& use, Beside&& beside) {
  auto* ranks = team.template shared<Ranks>(0);
  const int64_t tokens = p.tokens_of(b);
  team.sync();
  team.each(tokens, [&](int64_t i) { ranks[i] = 0; });
  team.sync();
  beside();
  team.each(tokens * p.plan.topk, [&](int64_t i) {
    const Split pair(i, p.plan.topk);
    const int64_t e = p.index(b * kTokenBlock + pair.item, pair.rest);
    if (e >= 0 && e < c.experts) set_bit(&ranks[pair.item], c.map.owner_E[e]);
    use(i, e);
  });
  team.sync();
}
template <class Team, class Use>
MOIETY_STEP void find_pairs(Team& team, const Control& c, const PrepareView& p, int64_t b,
                            Use&& use) {
  find_pairs(team, c, p, b, use, [] {});
}

// Adds to the batch's counts of errors.
struct Errors {
  int masked = 0, bad = 0;

  // Pair i of block b, whose index is e.
  MOIETY_STEP void look(Control& c, const PrepareView& p, int64_t b, int64_t i, int64_t e) {
    masked += e < 0;
    if (e < c.experts) return;
    ++bad;
    const int64_t behind = (p.plan.tokens - b * kTokenBlock) * p.plan.topk - i;
    raise(&c.behind_bad, static_cast<unsigned long long>(behind));
  }
  template <class Team>
  MOIETY_STEP void add_up(Team& team, Control& c) const {
    if (!team.any(masked + bad > 0)) return;
    const int64_t all = team.total(int64_t{bad} << 32 | masked);
    team.one([&] {
      if (all == 0) return;
      add(&c.masked, static_cast<unsigned long long>(all & 0xFFFFFFFF));
      add(&c.bad, static_cast<unsigned long long>(all >> 32));
    });
  }
};

// Marks that no slot has a row yet.
template <class Team>
MOIETY_STEP void clear_slots(Team& team, const PlanView& plan) {
  team.grid_warps(ceil_div(plan.capacity, 32), [&](auto& warp, int64_t i) {
    const int64_t first = 32 * i, left = plan.capacity - first;
    warp.each(left < 32 ? left : 32, [&](int64_t j) { plan.slot_row[first + j] = -1; });
  });
}

// Counts the rows for each rank of every block of tokens, and the batch's errors; its pairs, too,
// where all rows have room. And marks that no slot has a row yet.
struct CountRows {
  static constexpr int kThreads = 1024;
  Control* control;
  PrepareView p;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    if (failed(team, c)) return;
    const PlanView& plan = p.plan;
    clear_slots(team, plan);
    const auto* ranks = team.template shared<Ranks>(0);
    auto* pairs_E = team.template shared<int32_t>(8 * kTokenBlock);
    Errors errors;
    for (int64_t b = team.block(); b < plan.blocks; b += team.blocks()) {
      team.sync();
      team.each(c.experts, [&](int64_t e) { pairs_E[e] = 0; });
      find_pairs(team, c, p, b, [&](int64_t i, int64_t e) {
        errors.look(c, p, b, i, e);
        if (e >= 0 && e < c.experts) add(&pairs_E[e], 1);
      });
      team.each_warp(c.ranks, [&](auto& warp, int64_t r) {
        const int64_t rows = warp.number(
            p.tokens_of(b), [&](int64_t i) { return (ranks[i] >> r & 1) != 0; },
            [](int64_t, int64_t) {});
        warp.one([&] { plan.row_end_BR[b * c.ranks + r] = static_cast<int32_t>(rows); });
      });
      if (p.may_cut()) continue;
      team.each(c.experts, [&](int64_t e) { plan.pair_end_BE[b * c.experts + e] = pairs_E[e]; });
    }
    errors.add_up(team, c);
  }
};

// Turns counts of blocks into those up to the end of each block: of rows, without those that are
// too many for a rank, of pairs, or of both.
struct AddBlocks {
  static constexpr int kThreads = 256;
  Control* control;
  PrepareView p;
  bool rows, pairs;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    const int64_t of_rows = rows ? c.ranks : 0;
    team.grid_warps(of_rows + (pairs ? c.experts : 0), [&](auto& warp, int64_t i) {
      i < of_rows ? add_rows(warp, c, i) : add_pairs(warp, c, i - of_rows);
    });
  }

 private:
  template <class Warp>
  MOIETY_STEP void add_rows(Warp& warp, const Control& c, int64_t r) const {
    const int64_t most = p.most_rows(c, static_cast<int>(r));
    const auto kept = [&](int32_t sum) { return static_cast<int32_t>(sum < most ? sum : most); };
    int32_t* const rows_B = p.plan.row_end_BR + r;
    const int32_t all = warp.prefix(
        p.plan.blocks, [&](int64_t b) { return rows_B[b * c.ranks]; },
        [&](int64_t b, int32_t sum) { rows_B[b * c.ranks] = kept(sum); });
    warp.one([&] {
      c.scratch.uncut_R[r] = all;
      p.plan.rows_RR[c.rank * c.ranks + r] = kept(all);
    });
  }
  template <class Warp>
  MOIETY_STEP void add_pairs(Warp& warp, const Control& c, int64_t e) const {
    int32_t* const pairs_B = p.plan.pair_end_BE + e;
    const int32_t all = warp.prefix(
        p.plan.blocks, [&](int64_t b) { return pairs_B[b * c.experts]; },
        [&](int64_t b, int32_t sum) { pairs_B[b * c.experts] = sum; });
    warp.one([&] { p.plan.count_RE[int64_t{c.rank} * c.experts + e] = all; });
  }
};

// Of the ranks of a block's tokens, takes away those for which there is no row any more; calls
// number(token of the block, rank, row) for every row, and counted(rank, rows of the block before
// any cut) on one lane. The team meets behind it.
template <class Team, class Number, class Counted>
MOIETY_STEP void number_rows(Team& team, const Control& c, const PrepareView& p, int64_t b,
                             Number&& number, Counted&& counted) {
  auto* ranks = team.template shared<Ranks>(0);
  team.each_warp(c.ranks, [&](auto& warp, int64_t r) {
    const int64_t most = p.most_rows(c, static_cast<int>(r));
    const int64_t before = b == 0 ? 0 : p.plan.row_end(b - 1, static_cast<int>(r));
    // Other warps change other bits.
    const auto has = [&](int64_t i) { return (load_bits(&ranks[i]) >> r & 1) != 0; };
    const int64_t rows = warp.number(p.tokens_of(b), has, [&](int64_t i, int64_t at) {
      if (before + at < most) {
        number(i, static_cast<int>(r), before + at);
      } else {
        keep_bits(&ranks[i], ~(Ranks{1} << r));
      }
    });
    warp.one([&] { counted(static_cast<int>(r), rows); });
  });
  team.sync();
}

// Counts the pairs of block b that have a row, per expert, where some may have none. The team meets
// behind it.
template <class Team>
MOIETY_STEP void count_kept_pairs(Team& team, Control& c, const PrepareView& p, int64_t b,
                                  int32_t* pairs_E) {
  const auto* ranks = team.template shared<Ranks>(0);
  team.each(c.experts, [&](int64_t e) { pairs_E[e] = 0; });
  team.sync();
  team.each(p.tokens_of(b) * p.plan.topk, [&](int64_t i) {
    const Split pair(i, p.plan.topk);
    const int e = p.expert(c, b * kTokenBlock + pair.item, pair.rest);
    if (e < 0) return;
    if (ranks[pair.item] >> c.map.owner_E[e] & 1) {
      add(&pairs_E[e], 1);
    } else {
      add(&c.cut, 1ull);
    }
  });
  team.sync();
}

// The same of every block of tokens.
struct CountPairs {
  static constexpr int kThreads = 256;
  Control* control;
  PrepareView p;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    if (failed(team, c)) return;
    const PlanView& plan = p.plan;
    auto* pairs_E = team.template shared<int32_t>(8 * kTokenBlock);
    for (int64_t b = team.block(); b < plan.blocks; b += team.blocks()) {
      find_pairs(team, c, p, b, [](int64_t, int64_t) {});
      number_rows(
          team, c, p, b, [](int64_t, int, int64_t) {}, [](int, int64_t) {});
      count_kept_pairs(team, c, p, b, pairs_E);
      team.each(c.experts, [&](int64_t e) { plan.pair_end_BE[b * c.experts + e] = pairs_E[e]; });
    }
  }
};

}  // namespace moiety::moe::peers
