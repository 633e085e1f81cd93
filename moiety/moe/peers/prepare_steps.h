// The second half of prepare among GPU ranks: heads and counts of all ranks, and the slots.
#pragma once

#include "moiety/moe/peers/number_steps.h"
#include "moiety/moe/peers/trim_steps.h"

namespace moiety::moe::peers {

// Exchanges heads and counts with all peers. One block.
struct ExchangeHeads {
  static constexpr int kThreads = 512;
  Control* control;
  PrepareView p;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    if (failed(team, c)) return;
    const PlanView& plan = p.plan;
    const int64_t experts = c.experts, ranks = c.ranks, head = sizeof(MessageHead);
    team.one([&] { c.scratch.heads_R[c.rank] = own_head(c); });
    team.sync();
    // Calls f(word of the head and counts of rank s here, their place in a message).
    const auto for_words = [&](int s, auto&& f) {
      team.each((head / 4 + experts + ranks), [&](int64_t i) {
        const int64_t at = i - head / 4;
        int32_t* here = at < 0         ? reinterpret_cast<int32_t*>(&c.scratch.heads_R[s]) + i
                        : at < experts ? &plan.count_RE[s * experts + at]
                                       : &plan.rows_RR[s * ranks + at - experts];
        f(here, 4 * i);
      });
    };
    for (int i = 0; i + 1 < c.ranks; ++i) {
      std::byte* out = c.message(c.peer(i), c.rank);
      for_words(c.rank, [&](int32_t* here, int64_t at) { store(out + at, *here); });
    }
    team.sync();
    team.each(c.ranks - 1, [&](int64_t i) {
      store_release(c.ready_word(c.peer(i), c.rank, c.layout.chunks), c.entry.word);
    });
    const uint64_t start = nanoseconds();
    team.each(c.ranks - 1, [&](int64_t i) {
      const int s = c.peer(i);
      wait(c, c.ready_word(c.rank, s, c.layout.chunks), kSignatureBits, c.epoch,
           {.from = s, .chunk = c.layout.chunks});
    });
    end_waits(team, c, start);
    if (failed(team, c)) return;
    for (int i = 0; i + 1 < c.ranks; ++i) {
      const int s = c.peer(i);
      const std::byte* in = c.message(c.rank, s);
      for_words(s, [&](int32_t* here, int64_t at) { *here = load<int32_t>(in + at); });
    }
    team.sync();
    team.each(ranks, [&](int64_t s) { plan.tokens_R[s] = c.scratch.heads_R[s].tokens; });
    team.one([&] { compare(c); });
  }

 private:
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
  MOIETY_STEP void compare(Control& c) const {
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
      return poison_all(c, fault);
    }
  }
};

// Writes the plan's counts and info, and records errors, which are equal on all ranks. One block.
struct WriteCounts {
  static constexpr int kThreads = 256;
  Control* control;
  PrepareView p;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    if (failed(team, c)) return;
    const PlanView& plan = p.plan;
    const Scratch& at = c.scratch;
    const int32_t* experts = c.map.by_owner_E + c.map.begin_R[c.rank];
    const int64_t n = c.map.count(c.rank);
    team.each(n, [&](int64_t i) {
      const int e = experts[i];
      plan.rows_before[i] = at.count_E[e];
      plan.rows_real[i] = at.kept_E[e];
      plan.rows_padded[i] = round_up(at.kept_E[e], plan.alignment);
      plan.offset[i] = at.offset_E[e];
    });
    const int64_t kept = team.sum(n, [&](int64_t i) -> int64_t { return at.kept_E[experts[i]]; });
    const int64_t padded = team.sum(
        n, [&](int64_t i) -> int64_t { return round_up(at.kept_E[experts[i]], plan.alignment); });
    const int64_t own_dropped = team.sum(c.experts, [&](int64_t e) {
      const int64_t pairs = plan.count_RE[int64_t{c.rank} * c.experts + e];
      const int64_t alive = at.kept_E[e] - at.before_RE[int64_t{c.rank} * c.experts + e];
      return pairs - (alive < 0 ? 0 : alive < pairs ? alive : pairs);
    });
    team.one([&] {
      plan.offset[n] = padded;
      int64_t* info = plan.info;
      for (int i = 0; i < 16; ++i) info[i] = 0;
      info[kInfoPadded] = padded;
      info[kInfoKept] = kept;
      info[kInfoRequired] = at.required_R[c.rank];
      info[kInfoDropped] = at.dropped_R[c.rank];
      info[kInfoCapacity] = at.heads_R[c.rank].capacity;
      info[kInfoOwnDropped] = own_dropped + static_cast<int64_t>(c.cut);
      info[kInfoOwnMasked] = static_cast<int64_t>(c.masked);
      info[kInfoOwnBad] = static_cast<int64_t>(c.bad);
      c.masked = c.bad = c.cut = c.behind_bad = 0;
      for (int r = 0; r < c.ranks; ++r) {
        const MessageHead& head = at.heads_R[r];
        info[kInfoGroupTokens] += head.tokens;
        raise_to(info[kInfoGroupRequired], at.required_R[r]);
        info[kInfoGroupDropped] += at.dropped_R[r] + head.cut;
        raise_to(info[kInfoLargestRows], head.most_rows);
      }
      info[kInfoGroupOverflow] = info[kInfoGroupDropped] > 0;
      record_errors(c);
    });
  }

 private:
  MOIETY_STEP static void raise_to(int64_t& x, int64_t value) { x = x < value ? value : x; }
  MOIETY_STEP void record_errors(Control& c) const {
    const Scratch& at = c.scratch;
    const auto find = [&](Finding::Kind kind, int rank, int64_t a, int64_t b, int64_t e,
                          int64_t d) {
      c.findings.add({.epoch = p.epoch, .kind = kind, .rank = rank, .value = {a, b, e, d}});
    };
    for (int r = 0; r < c.ranks; ++r) {
      const MessageHead& head = at.heads_R[r];
      if (head.bad == 0) continue;
      find(Finding::Kind::kBadIndex, r, head.bad_token, head.bad_choice, head.bad_index, 0);
    }
    const int64_t* info = p.plan.info;
    if (info[kInfoGroupOverflow] == 0) return;
    if (p.overflow == OverflowPolicy::kReport) {
      c.findings.add_overflow(info[kInfoGroupRequired], info[kInfoGroupDropped]);
    }
    if (p.overflow != OverflowPolicy::kError) return;
    for (int r = 0; r < c.ranks; ++r) {
      const MessageHead& head = at.heads_R[r];
      if (head.cut == 0) continue;
      find(Finding::Kind::kPeerRows, r, head.most_rows, head.most_rows_to, p.plan.rows_max, 0);
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

// Finds the slots of own pairs and of rows that came, and the way back from slots to rows.
struct FindSlots {
  static constexpr int kThreads = 256;
  Control* control;
  PrepareView p;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    const PlanView& plan = p.plan;
    team.grid_warps(plan.tokens, [&](auto& warp, int64_t t) { find_own(warp, c, t); });
    for (int s = 0; s < c.ranks; ++s) {
      if (s == c.rank) continue;
      team.grid_warps(plan.rows(s, c.rank),
                      [&](auto& warp, int64_t j) { find_received(warp, c, s, j); });
    }
  }

 private:
  // The slot of pair `number` among rank s's pairs of the expert; -1 if it is not alive.
  MOIETY_STEP int32_t slot_of(const Control& c, int s, int e, int64_t number) const {
    const int64_t position = c.scratch.before_RE[int64_t{s} * c.experts + e] + number;
    if (position >= c.scratch.kept_E[e]) return -1;
    return static_cast<int32_t>(c.scratch.offset_E[e] + position);
  }

  template <class Warp>
  MOIETY_STEP void find_own(Warp& warp, const Control& c, int64_t t) const {
    const PlanView& plan = p.plan;
    int32_t* slot_K = plan.slot_TK + t * plan.topk;  // numbers, for now
    int32_t* row_R = plan.row_TR + t * c.ranks;
    const int64_t own_row = row_R[c.rank];
    const uint64_t ranks = warp.bits(plan.topk, [&](int64_t k) -> uint64_t {
      const int32_t number = slot_K[k];
      const int e = number < 0 ? -1 : p.expert(c, t, k);
      const int32_t here = number < 0 ? -1 : slot_of(c, c.rank, e, number);
      const int32_t of = here < 0 ? -1 : c.map.owner_E[e];
      slot_K[k] = here;
      plan.owner_TK[t * plan.topk + k] = of;
      if (own_row >= 0) {
        plan.slots(c.rank, own_row)[k] = of == c.rank ? here : -1;
        if (of == c.rank) {
          plan.slot_row[here] = static_cast<int32_t>(c.rank * plan.tokens_max + own_row);
        }
      }
      return here < 0 ? 0 : uint64_t{1} << of;
    });
    warp.each(c.ranks, [&](int64_t r) {
      if ((ranks >> r & 1) == 0) row_R[r] = -1;
    });
  }

  template <class Warp>
  MOIETY_STEP void find_received(Warp& warp, const Control& c, int s, int64_t j) const {
    const PlanView& plan = p.plan;
    const std::byte* in =
        c.message(c.rank, s) + head_bytes(c.experts, c.ranks) + j * routing_bytes(plan.topk);
    warp.one([&] { plan.token(s, j) = load<int32_t>(in); });
    warp.each(plan.topk, [&](int64_t k) {
      const int32_t local = load<int32_t>(in + 8 + 8 * k), number = load<int32_t>(in + 12 + 8 * k);
      const int32_t slot =
          local < 0 ? -1 : slot_of(c, s, c.map.by_owner_E[c.map.begin_R[c.rank] + local], number);
      plan.slots(s, j)[k] = slot;
      if (slot >= 0) plan.slot_row[slot] = static_cast<int32_t>(s * plan.tokens_max + j);
    });
  }
};

}  // namespace moiety::moe::peers
