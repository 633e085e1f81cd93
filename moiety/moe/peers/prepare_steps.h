// The second half of prepare among GPU ranks: heads and counts of all ranks, and the slots.
#pragma once

#include "moiety/moe/peers/trim_steps.h"

namespace moiety::moe::peers {

// Exchanges heads and counts with all peers, and tells them of this rank's entry. One block. Over
// collectives the two halves are steps.
struct ExchangeHeads {
  static constexpr int kThreads = 512;
  Control* control;
  PrepareView p;
  bool sends = true, receives = true;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    if (failed(team, c)) return;
    if (sends) send(team, c);
    if (receives) receive(team, c);
  }
  template <class Team>
  MOIETY_STEP void send(Team& team, Control& c) const {
    // The head by a warp, the counts by the others meanwhile.
    team.each_warp(team.warps(), [&](auto& warp, int64_t w) {
      if (w + 1 != team.warps()) return;
      warp.one([&] { c.scratch.heads_R[c.rank] = own_head(c); });
      warp.sync();
      for (int i = 0; i + 1 < c.ranks; ++i) {
        std::byte* out = c.message(c.peer(i), c.rank);
        warp.each(kHeadWords, [&](int64_t at) { store(out + 4 * at, *word(c, c.rank, at)); });
      }
    });
    for (int i = 0; i + 1 < c.ranks; ++i) {
      std::byte* out = c.message(c.peer(i), c.rank);
      team.each(c.experts + c.ranks, [&](int64_t at) {
        store(out + 4 * (kHeadWords + at), *word(c, c.rank, kHeadWords + at));
      });
    }
    team.sync();
    // By warps of their own, since a lane waits until what it tells of has arrived.
    team.each_warp(2 * (c.ranks - 1), [&](auto& warp, int64_t i) {
      const int r = c.peer(i / 2);
      warp.one([&] {
        if (i % 2 == 0) {
          store_release(c.ready_word(r, c.rank, c.layout.chunks), c.entry.word);
        } else {
          store_entry(c, r, c.half(), c.entry, {});
          post_head(c, r, c.half(), c.entry);
        }
      });
    });
  }
  // False if the group has failed.
  template <class Team>
  MOIETY_STEP bool receive(Team& team, Control& c) const {
    const uint64_t start = nanoseconds();
    bool good = true;
    team.each(c.ranks - 1, [&](int64_t i) {
      const int s = c.peer(i);
      good = wait(c, c.ready_word(c.rank, s, c.layout.chunks), kSignatureBits, c.epoch,
                  {.from = s, .chunk = c.layout.chunks}) &&
             good;
    });
    if (team.any(!good)) return false;
    on_last(team, [&] { count_wait(c, start); });
    for (int i = 0; i + 1 < c.ranks; ++i) {
      const int s = c.peer(i);
      const std::byte* in = c.message(c.rank, s);
      team.each(kHeadWords + c.experts + c.ranks,
                [&](int64_t at) { *word(c, s, at) = load<int32_t>(in + 4 * at); });
    }
    team.sync();
    team.each(c.ranks, [&](int64_t s) { p.plan.tokens_R[s] = c.scratch.heads_R[s].tokens; });
    on_last(team, [&] { good = compare(c); });
    return !team.any(!good);
  }

 private:
  static constexpr int64_t kHeadWords = sizeof(MessageHead) / 4;
  // Word `at` of the head and counts of rank s, as they lie in a message.
  MOIETY_STEP int32_t* word(const Control& c, int s, int64_t at) const {
    const int64_t experts = c.experts, i = at - kHeadWords;
    if (i < 0) return reinterpret_cast<int32_t*>(&c.scratch.heads_R[s]) + at;
    return i < experts ? &p.plan.count_RE[s * experts + i]
                       : &p.plan.rows_RR[int64_t{s} * c.ranks + i - experts];
  }
  MOIETY_STEP MessageHead own_head(const Control& c) const {
    const PlanView& plan = p.plan;
    MessageHead out;
    const int64_t limit = p.limit ? *p.limit : plan.capacity;
    out.capacity = limit < 0 ? 0 : limit < plan.capacity ? limit : plan.capacity;
    out.tokens = static_cast<int32_t>(plan.tokens);
    out.topk = plan.topk;
    out.experts = c.experts;
    out.alignment = static_cast<int32_t>(plan.alignment);
    out.policy = static_cast<int32_t>(p.overflow);
    out.bad = static_cast<int32_t>(c.bad);
    out.cut = static_cast<int32_t>(c.cut);
    if (c.bad > 0) {
      const int64_t pair = plan.tokens * plan.topk - static_cast<int64_t>(c.behind_bad);
      out.bad_token = static_cast<int32_t>(pair / plan.topk);
      out.bad_choice = static_cast<int32_t>(pair % plan.topk);
      out.bad_index = p.index(out.bad_token, out.bad_choice);
    }
    for (int r = 0; r < c.ranks; ++r) {
      if (r == c.rank || c.scratch.uncut_R[r] <= out.most_rows) continue;
      out.most_rows = c.scratch.uncut_R[r];
      out.most_rows_to = r;
    }
    return out;
  }
  MOIETY_STEP bool compare(Control& c) const {
    const MessageHead* heads = c.scratch.heads_R;
    for (int r = 1; r < c.ranks; ++r) {
      const int field = differing_field(heads[0], heads[r]);
      if (field < 0) continue;
      Fault fault;
      fault.kind = static_cast<uint32_t>(Failure::kPrepare);
      fault.about = c.rank == r ? 0 : r;
      fault.mine = c.entry;
      fault.heads[0] = heads[0];
      fault.heads[1] = heads[r];
      fault.field = field;
      fault.other = r;
      poison_all(c, fault);
      return false;
    }
    return true;
  }
};

// Exchanges heads and counts, finds which pairs are kept, writes the plan's counts and info, and
// records errors, which are equal on all ranks. One block.
struct SettlePlan {
  static constexpr int kThreads = 1024;
  ExchangeHeads heads;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *heads.control;
    heads(team);
    if (failed(team, c)) return;
    TrimExperts{heads.p}(team, c, [] {});
    team.one([&] { write_info(c); });
  }
  MOIETY_STEP void write_info(Control& c) const {
    const Scratch& at = c.scratch;
    int64_t tokens = 0, required = 0, most = 0;
    for (int r = 0; r < c.ranks; ++r) {
      const MessageHead& head = at.heads_R[r];
      tokens += head.tokens;
      required = larger(required, at.required_R[r]);
      most = larger(most, head.most_rows);
    }
    const Trims trims = *at.trims;
    const auto dropped = static_cast<int64_t>(trims.dropped);
    const int64_t info[16] = {trims.padded,
                              trims.kept,
                              at.required_R[c.rank],
                              at.dropped_R[c.rank],
                              at.heads_R[c.rank].capacity,
                              tokens,
                              static_cast<int64_t>(trims.own_dropped + c.cut),
                              static_cast<int64_t>(c.masked),
                              static_cast<int64_t>(c.bad),
                              required,
                              dropped,
                              dropped > 0,
                              most};
    for (int i = 0; i < 16; ++i) heads.p.plan.info[i] = info[i];
    heads.p.plan.offset[c.map.count(c.rank)] = trims.padded;
    c.masked = c.bad = c.cut = c.behind_bad = 0;
    record_errors(c, required, dropped);
  }

 private:
  MOIETY_STEP static int64_t larger(int64_t x, int64_t y) { return x < y ? y : x; }
  MOIETY_STEP void record_errors(Control& c, int64_t required, int64_t dropped) const {
    const Scratch& at = c.scratch;
    const auto find = [&](Finding::Kind kind, int rank, int64_t a, int64_t b, int64_t e,
                          int64_t d) {
      c.findings.add({.epoch = heads.p.epoch, .kind = kind, .rank = rank, .value = {a, b, e, d}});
    };
    for (int r = 0; r < c.ranks; ++r) {
      const MessageHead& head = at.heads_R[r];
      if (head.bad == 0) continue;
      find(Finding::Kind::kBadIndex, r, head.bad_token, head.bad_choice, head.bad_index, 0);
    }
    if (dropped == 0) return;
    if (heads.p.overflow == OverflowPolicy::kReport) c.findings.add_overflow(required, dropped);
    if (heads.p.overflow != OverflowPolicy::kError) return;
    for (int r = 0; r < c.ranks; ++r) {
      const MessageHead& head = at.heads_R[r];
      if (head.cut == 0) continue;
      find(Finding::Kind::kPeerRows, r, head.most_rows, head.most_rows_to, heads.p.plan.rows_max,
           0);
      break;
    }
    for (int r = 0; r < c.ranks; ++r) {
      if (at.dropped_R[r] == 0) continue;
      const int largest = at.largest_R[r];
      find(Finding::Kind::kCapacity, r, at.required_R[r], at.heads_R[r].capacity, largest,
           at.count_E[largest]);
      break;
    }
  }
};

// Finds the slots of own pairs and of rows that came, and the way back from slots to rows. A thread
// has a pair.
struct FindSlots {
  static constexpr int kThreads = 256;
  Control* control;
  PrepareView p;

  // The tokens or rows that a block of so many threads takes at a time.
  MOIETY_HD_INLINE static int64_t tile(int64_t threads, int topk) { return threads / topk; }

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    if (!failed(team, *control)) find(team, control->half());
  }
  // Messages lie in that half.
  template <class Team>
  MOIETY_STEP void find(Team& team, int half) const {
    const Control& c = *control;
    const PlanView& plan = p.plan;
    const bool lost = c.scratch.trims->dropped > 0;
    const int64_t tile = FindSlots::tile(32 * team.warps(), plan.topk);
    // The tiles of each rank begin with another block, as there may be few.
    const auto for_tiles = [&](int64_t shift, int64_t n, auto&& take) {
      const auto begin = Split(team.block() + shift, team.blocks()).rest;
      for (int64_t first = begin * tile; first < n; first += team.blocks() * tile) {
        take(first, n - first < tile ? n - first : tile);
      }
    };
    for_tiles(0, plan.tokens, [&](int64_t first, int64_t n) {
      team.each(n * plan.topk, [&](int64_t i) { find_own(c, first * plan.topk + i); });
      if (!lost) return;
      team.sync();
      team.each(n * c.ranks, [&](int64_t i) { find_dead(c, first * c.ranks + i); });
    });
    for (int s = 0; s < c.ranks; ++s) {
      if (s == c.rank) continue;
      for_tiles(s + 1, plan.rows(s, c.rank), [&](int64_t first, int64_t n) {
        team.each(n * plan.topk, [&](int64_t i) {
          const Split pair(i, plan.topk);
          find_received(c, c.message_in(half, c.rank, s), s, first + pair.item, pair.rest);
        });
      });
    }
  }

 private:
  // The slot of pair `number` among rank s's pairs of the expert; -1 if it is not alive.
  MOIETY_STEP int32_t slot_of(const Control& c, int s, int e, int64_t number) const {
    const int64_t position = c.scratch.before_RE[int64_t{s} * c.experts + e] + number;
    const int32_t kept = c.scratch.kept_E[e], offset = c.scratch.offset_E[e];
    return position < kept ? static_cast<int32_t>(offset + position) : -1;
  }
  MOIETY_STEP void find_own(const Control& c, int64_t pair) const {
    const PlanView& plan = p.plan;
    const Split at(pair, plan.topk);
    const int32_t number = plan.slot_TK[pair];
    const int e = p.expert(c, at.item, at.rest);
    const int32_t own_row = plan.row_TR[at.item * c.ranks + c.rank];
    const int32_t here = number < 0 ? -1 : slot_of(c, c.rank, e, number);
    const int32_t of = here < 0 ? -1 : c.map.owner_E[e];
    plan.slot_TK[pair] = here;
    plan.owner_TK[pair] = of;
    if (own_row < 0) return;
    plan.slots(c.rank, own_row)[at.rest] = of == c.rank ? here : -1;
    if (of != c.rank) return;
    plan.slot_row[here] = static_cast<int32_t>(c.rank * plan.tokens_max + own_row);
  }
  // Takes away a row without a live pair.
  MOIETY_STEP void find_dead(const Control& c, int64_t at) const {
    const Split row(at, c.ranks);
    const int32_t* owner_K = p.plan.owner_TK + row.item * p.plan.topk;
    bool alive = false;
    for (int k = 0; k < p.plan.topk; ++k) alive = alive || owner_K[k] == row.rest;
    if (!alive) p.plan.row_TR[at] = -1;
  }
  MOIETY_STEP void find_received(const Control& c, const std::byte* message, int s, int64_t j,
                                 int64_t k) const {
    const PlanView& plan = p.plan;
    const std::byte* in = message + head_bytes(c.experts, c.ranks) + j * routing_bytes(plan.topk);
    const int32_t local = load<int32_t>(in + 8 + 8 * k), number = load<int32_t>(in + 12 + 8 * k);
    if (k == 0) plan.token(s, j) = load<int32_t>(in);
    const int32_t slot =
        local < 0 ? -1 : slot_of(c, s, c.map.by_owner_E[c.map.begin_R[c.rank] + local], number);
    plan.slots(s, j)[k] = slot;
    if (slot >= 0) plan.slot_row[slot] = static_cast<int32_t>(s * plan.tokens_max + j);
  }
};

}  // namespace moiety::moe::peers
