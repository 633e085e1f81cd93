// prepare among GPU ranks: the numbers of pairs and rows, and the records for peers.
#pragma once

#include "moiety/moe/peers/count_steps.h"

namespace moiety::moe::peers {

// A team's memory below: the ranks of each token of a block, the experts of its pairs, their
// numbers, and the pairs of each expert before those of each warp.
struct NumberPlaces {
  static constexpr int64_t kExperts = 8 * kTokenBlock;
  int64_t numbers, before, bytes;

  MOIETY_HD_INLINE NumberPlaces(int64_t topk, int64_t experts, int64_t warps)
      : numbers(kExperts + 2 * kTokenBlock * topk),
        before(numbers + 4 * kTokenBlock * topk),
        bytes(before + 2 * warps * experts) {}
};

// What a rank with at most one block of tokens counts: rows for rank r, before any cut, and pairs.
MOIETY_STEP void keep_rows(const Control& c, const PrepareView& p, int r, int64_t rows) {
  const int64_t most = p.most_rows(c, r);
  const auto kept = static_cast<int32_t>(rows < most ? rows : most);
  c.scratch.uncut_R[r] = static_cast<int32_t>(rows);
  p.plan.rows_RR[c.rank * c.ranks + r] = kept;
  if (p.plan.blocks > 0) p.plan.row_end_BR[r] = kept;
}
MOIETY_STEP void keep_pairs(const Control& c, const PrepareView& p, int64_t e, int32_t count) {
  p.plan.count_RE[int64_t{c.rank} * c.experts + e] = count;
  if (p.plan.blocks > 0) p.plan.pair_end_BE[e] = count;
}

// Numbers own rows and pairs (for now in slot_TK), and stores the records of rows for peers. `Many`:
// for many experts, of which the memory of a team holds fewer warps' counts.
template <bool many>
struct NumberPairs {
  static constexpr int kThreads = many ? 256 : 1024;
  static constexpr int64_t kMostExperts = many ? INT32_MAX : 1024;
  Control* control;
  PrepareView p;
  bool alone = false;  // there is at most one block of tokens
  // It counts the block's rows and pairs, too, and marks that no slot has a row yet.
  bool counts = alone;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    if (failed(team, c)) return;
    const PlanView& plan = p.plan;
    if (counts) clear_slots(team, plan);
    for (int64_t b = team.block(); b < (alone ? 1 : plan.blocks); b += team.blocks()) {
      team.sync();
      number(team, c, b);
      send(team, c, b, [&](int r) { return c.message(r, c.rank); });
    }
  }
  // The numbers of a block. The team meets behind it, but for what slot_TK gets.
  template <class Team>
  MOIETY_STEP void number(Team& team, Control& c, int64_t b) const {
    const PlanView& plan = p.plan;
    const int topk = plan.topk;
    const NumberPlaces at(topk, c.experts, team.warps());
    auto* expert_P = team.template shared<int16_t>(at.kExperts);
    auto* number_P = team.template shared<int32_t>(at.numbers);
    const int64_t first = b * kTokenBlock, tokens = p.tokens_of(b), pairs = tokens * topk;
    Errors errors;
    team.each(tokens * c.ranks, [&](int64_t i) { plan.row_TR[first * c.ranks + i] = -1; });
    find_pairs(team, c, p, b, [&](int64_t i, int64_t e) {
      if (counts) errors.look(c, p, b, i, e);
      expert_P[i] = static_cast<int16_t>(e < c.experts ? e < 0 ? -1 : e : -1);
    });
    if (counts) errors.add_up(team, c);
    number_rows(
        team, c, p, b,
        [&](int64_t i, int r, int64_t row) {
          plan.row_TR[(first + i) * c.ranks + r] = static_cast<int32_t>(row);
          if (r == c.rank) plan.token(r, row) = static_cast<int32_t>(first + i);
        },
        [&](int r, int64_t rows) {
          if (counts) keep_rows(c, p, r, rows);
        });
    if (p.may_cut()) cut_pairs(team, c, pairs);
    number_pairs(team, c, b, pairs);
    team.each(pairs, [&](int64_t i) {
      plan.slot_TK[first * topk + i] = expert_P[i] < 0 ? -1 : number_P[i];
    });
  }
  // The records of a numbered block, for the messages `message_for(rank)`.
  template <class Team, class MessageFor>
  MOIETY_STEP void send(Team& team, const Control& c, int64_t b, MessageFor&& message_for) const {
    const NumberPlaces at(p.plan.topk, c.experts, team.warps());
    const auto* ranks = team.template shared<Ranks>(0);
    const auto* expert_P = team.template shared<int16_t>(at.kExperts);
    const auto* number_P = team.template shared<int32_t>(at.numbers);
    team.each(p.tokens_of(b) * p.plan.topk, [&](int64_t i) {
      send(c, b * kTokenBlock, i, ranks, {expert_P[i], number_P[i]}, message_for);
    });
  }

 private:
  // Takes away the pairs whose tokens have no row. The team meets behind it.
  template <class Team>
  MOIETY_STEP void cut_pairs(Team& team, Control& c, int64_t pairs) const {
    const auto* ranks = team.template shared<Ranks>(0);
    auto* expert_P = team.template shared<int16_t>(NumberPlaces::kExperts);
    team.each(pairs, [&](int64_t i) {
      if (expert_P[i] < 0) return;
      if (ranks[Split(i, p.plan.topk).item] >> c.map.owner_E[expert_P[i]] & 1) return;
      expert_P[i] = -1;
      if (counts) add(&c.cut, 1ull);
    });
    team.sync();
  }
  // A warp has a run of the pairs. It numbers them from 0 on; what pairs of the runs before count is
  // added. The team meets behind it.
  template <class Team>
  MOIETY_STEP void number_pairs(Team& team, const Control& c, int64_t b, int64_t pairs) const {
    const int experts = c.experts;
    const NumberPlaces at(p.plan.topk, experts, team.warps());
    const auto* expert_P = team.template shared<int16_t>(at.kExperts);
    auto* number_P = team.template shared<int32_t>(at.numbers);
    auto* before_WE = team.template shared<uint16_t>(at.before);
    const int64_t warps = team.warps(), run = round_up(ceil_div(pairs, warps), 32);
    team.each_warp(warps, [&](auto& warp, int64_t w) {
      uint16_t* const count_E = before_WE + w * experts;
      warp.each(experts, [&](int64_t e) { count_E[e] = 0; });
      warp.sync();
      const int64_t end = (w + 1) * run;
      warp.same(
          w * run, end < pairs ? end : pairs, [&](int64_t i) { return int{expert_P[i]}; },
          [&](int64_t i, int e, int number) { number_P[i] = count_E[e] + number; },
          [&](int e, int n) { count_E[e] = static_cast<uint16_t>(count_E[e] + n); });
    });
    team.sync();
    team.each(experts, [&](int64_t e) {
      constexpr int kTogether = 8;  // counts that wait for memory together
      int sum = 0;
      for (int64_t w = 0; w < warps; w += kTogether) {
        uint16_t* const before_W = before_WE + w * experts + e;
        uint16_t count_W[kTogether] = {};
        MOIETY_UNROLL
        for (int i = 0; i < kTogether; ++i) {
          if (w + i < warps) count_W[i] = before_W[i * experts];
        }
        MOIETY_UNROLL
        for (int i = 0; i < kTogether; ++i) {
          if (w + i < warps) before_W[i * experts] = static_cast<uint16_t>(sum);
          sum += count_W[i];
        }
      }
      if (counts) keep_pairs(c, p, e, sum);
    });
    team.sync();
    const int32_t* const ended = b == 0 ? nullptr : p.plan.pair_end_BE + (b - 1) * experts;
    team.each(pairs, [&](int64_t i) {
      const int e = expert_P[i];
      if (e < 0) return;
      number_P[i] += before_WE[Split(i, run).item * experts + e] + (ended ? ended[e] : 0);
    });
    team.sync();
  }

  // Stores what the records of its token say of pair i of the block that begins with token `first`,
  // and with the first pair the token. A record is that of a row for a peer.
  template <class MessageFor>
  MOIETY_STEP void send(const Control& c, int64_t first, int64_t i, const Ranks* ranks,
                        const Choice& numbered, MessageFor&& message_for) const {
    const int expert = numbered.expert;
    const int32_t number = numbered.pair;
    const Split pair(i, p.plan.topk);
    const int owner = expert < 0 ? -1 : c.map.owner_E[expert];
    const int32_t local = expert < 0 ? -1 : c.map.local_E[expert];
    const int64_t t = first + pair.item;
    for (int r = 0; r < c.ranks; ++r) {
      if (r == c.rank || (ranks[pair.item] >> r & 1) == 0) continue;
      std::byte* const out = message_for(r) + head_bytes(c.experts, c.ranks) +
                             p.plan.row_TR[t * c.ranks + r] * routing_bytes(p.plan.topk);
      const Choice choice = owner == r ? Choice{local, number} : Choice{};
      store(out + 8 * (pair.rest + 1), choice);
      if (pair.rest == 0) store(out, Choice{static_cast<int32_t>(t), 0});
    }
  }
};

}  // namespace moiety::moe::peers
