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

// The ranks that token t has a pair of.
MOIETY_STEP Ranks ranks_of(const Control& c, const PrepareView& p, int64_t t) {
  Ranks out = 0;
  for (int k = 0; k < p.plan.topk; ++k) {
    const int e = p.expert(c, t, k);
    if (e >= 0) out |= Ranks{1} << c.map.owner_E[e];
  }
  return out;
}

// Fills the ranks of a block's tokens. The team meets behind it.
template <class Team>
MOIETY_STEP void find_ranks(Team& team, const Control& c, const PrepareView& p, int64_t b) {
  auto* ranks = team.template shared<Ranks>(0);
  team.sync();
  team.each(p.tokens_of(b), [&](int64_t i) { ranks[i] = ranks_of(c, p, b * kTokenBlock + i); });
  team.sync();
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
    for (int64_t first = team.block() * kTokenBlock; first < plan.capacity;
         first += team.blocks() * kTokenBlock) {
      const int64_t left = plan.capacity - first;
      team.each(left < kTokenBlock ? left : kTokenBlock,
                [&](int64_t i) { plan.slot_row[first + i] = -1; });
    }
    const auto* ranks = team.template shared<Ranks>(0);
    auto* pairs_E = team.template shared<int32_t>(8 * kTokenBlock);
    for (int64_t b = team.block(); b < plan.blocks; b += team.blocks()) {
      const int64_t tokens = p.tokens_of(b);
      find_ranks(team, c, p, b);
      team.each(tokens, [&](int64_t i) { find_errors(c, b * kTokenBlock + i); });
      team.each_warp(c.ranks, [&](auto& warp, int64_t r) {
        const int64_t rows = warp.number(
            tokens, [&](int64_t i) { return (ranks[i] >> r & 1) != 0; }, [](int64_t, int64_t) {});
        warp.one([&] { plan.row_end_BR[b * c.ranks + r] = static_cast<int32_t>(rows); });
      });
      if (p.may_cut()) continue;
      team.each(c.experts, [&](int64_t e) { pairs_E[e] = 0; });
      team.sync();
      team.each(tokens * plan.topk, [&](int64_t i) {
        const int e = p.expert(c, b * kTokenBlock + i / plan.topk, i % plan.topk);
        if (e >= 0) add(&pairs_E[e], 1);
      });
      team.sync();
      team.each(c.experts, [&](int64_t e) { plan.pair_end_BE[b * c.experts + e] = pairs_E[e]; });
    }
  }

 private:
  MOIETY_STEP void find_errors(Control& c, int64_t t) const {
    int masked = 0, bad = 0;
    for (int k = 0; k < p.plan.topk; ++k) {
      const int64_t e = p.index(t, k);
      masked += e < 0;
      if (e < c.experts) continue;
      if (bad++ > 0) continue;
      const int64_t behind = p.plan.tokens * p.plan.topk - (t * p.plan.topk + k);
      raise(&c.behind_bad, static_cast<unsigned long long>(behind));
    }
    if (masked > 0) add(&c.masked, static_cast<unsigned long long>(masked));
    if (bad > 0) add(&c.bad, static_cast<unsigned long long>(bad));
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

// Fills the ranks of a block's tokens, without those for which there is no row any more; calls
// number(token of the block, rank, row) for every row. The team meets behind it.
template <class Team, class Number>
MOIETY_STEP void number_rows(Team& team, const Control& c, const PrepareView& p, int64_t b,
                             Number&& number) {
  auto* ranks = team.template shared<Ranks>(0);
  find_ranks(team, c, p, b);
  team.each_warp(c.ranks, [&](auto& warp, int64_t r) {
    const int64_t most = p.most_rows(c, static_cast<int>(r));
    const int64_t before = b == 0 ? 0 : p.plan.row_end(b - 1, static_cast<int>(r));
    // Other warps change other bits.
    const auto has = [&](int64_t i) { return (load_bits(&ranks[i]) >> r & 1) != 0; };
    warp.number(p.tokens_of(b), has, [&](int64_t i, int64_t at) {
      if (before + at < most) {
        number(i, static_cast<int>(r), before + at);
      } else {
        keep_bits(&ranks[i], ~(Ranks{1} << r));
      }
    });
  });
  team.sync();
}

// Counts the pairs that have a row, per expert, of every block of tokens; where some may have none.
struct CountPairs {
  static constexpr int kThreads = 256;
  Control* control;
  PrepareView p;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    if (failed(team, c)) return;
    const PlanView& plan = p.plan;
    const auto* ranks = team.template shared<Ranks>(0);
    auto* pairs_E = team.template shared<int32_t>(8 * kTokenBlock);
    for (int64_t b = team.block(); b < plan.blocks; b += team.blocks()) {
      number_rows(team, c, p, b, [](int64_t, int, int64_t) {});
      team.each(c.experts, [&](int64_t e) { pairs_E[e] = 0; });
      team.sync();
      team.each(p.tokens_of(b) * plan.topk, [&](int64_t i) {
        const int64_t of = i / plan.topk;
        const int e = p.expert(c, b * kTokenBlock + of, i % plan.topk);
        if (e < 0) return;
        if (ranks[of] >> c.map.owner_E[e] & 1) {
          add(&pairs_E[e], 1);
        } else {
          add(&c.cut, 1ull);
        }
      });
      team.sync();
      team.each(c.experts, [&](int64_t e) { plan.pair_end_BE[b * c.experts + e] = pairs_E[e]; });
    }
  }
};

}  // namespace moiety::moe::peers
