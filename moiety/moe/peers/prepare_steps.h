// prepare among GPU ranks. The order of pairs and rows is that of the CPU (prepare_cpu.cpp): each
// number is counted by one thread in the order of the tokens, so none depends on which thread comes
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
  // The most rows that there may be for rank r.
  MOIETY_HD_INLINE int64_t most_rows(const Control& c, int r) const {
    return r == c.rank ? plan.tokens_max : plan.rows_max;
  }
};

using Ranks = unsigned long long;  // a bit for each
static_assert(kMostMappedRanks <= 64);

// A team's memory in the steps below: the ranks of each token of a block, then counts of experts,
// then the experts of the block's pairs.
constexpr int64_t shared_ranks() { return 8 * kTokenBlock; }
constexpr int64_t shared_counts(int64_t experts) { return shared_ranks() + 4 * experts; }
constexpr int64_t shared_pairs(int64_t experts, int64_t topk) {
  return round_up(shared_counts(experts), 8) + 2 * kTokenBlock * topk;
}

// The ranks that token t has a pair of.
MOIETY_STEP Ranks ranks_of(const Control& c, const PrepareView& p, int64_t t) {
  Ranks out = 0;
  for (int k = 0; k < p.plan.topk; ++k) {
    const int e = p.expert(c, t, k);
    if (e >= 0) out |= Ranks{1} << c.map.owner_E[e];
  }
  return out;
}

// Counts the rows for each rank of every block of tokens, and the batch's errors; and marks that no
// slot has a row yet.
struct CountRows {
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
    auto* ranks = team.template shared<Ranks>(0);
    for (int64_t b = team.block(); b < plan.blocks; b += team.blocks()) {
      const int64_t tokens = p.tokens_of(b);
      team.sync();
      team.each(tokens, [&](int64_t i) {
        ranks[i] = ranks_of(c, p, b * kTokenBlock + i);
        find_errors(c, b * kTokenBlock + i);
      });
      team.sync();
      team.each(c.ranks, [&](int64_t r) {
        int32_t rows = 0;
        for (int64_t i = 0; i < tokens; ++i) rows += static_cast<int32_t>(ranks[i] >> r & 1);
        plan.row_end_BR[b * c.ranks + r] = rows;
      });
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

// Turns the counts of rows into the rows up to the end of each block, without those that are too
// many for a rank.
struct AddRows {
  Control* control;
  PrepareView p;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    const PlanView& plan = p.plan;
    team.each(c.ranks, [&](int64_t r) {
      const int64_t most = p.most_rows(c, static_cast<int>(r));
      int64_t sum = 0;
      for (int64_t b = 0; b < plan.blocks; ++b) {
        int32_t& rows = plan.row_end_BR[b * c.ranks + r];
        sum += rows;
        rows = static_cast<int32_t>(sum < most ? sum : most);
      }
      c.scratch.uncut_R[r] = static_cast<int32_t>(sum);
      plan.rows_RR[c.rank * c.ranks + r] = static_cast<int32_t>(sum < most ? sum : most);
    });
  }
};

// Fills the ranks of a block's tokens, without those for which there is no row any more; calls
// number(token of the block, rank, row) for every row. The team meets behind it.
template <class Team, class Number>
MOIETY_STEP void number_rows(Team& team, const Control& c, const PrepareView& p, int64_t b,
                             Number&& number) {
  auto* ranks = team.template shared<Ranks>(0);
  const int64_t tokens = p.tokens_of(b);
  team.sync();
  team.each(tokens, [&](int64_t i) { ranks[i] = ranks_of(c, p, b * kTokenBlock + i); });
  team.sync();
  team.each(c.ranks, [&](int64_t r) {
    const int64_t most = p.most_rows(c, static_cast<int>(r));
    int64_t row = b == 0 ? 0 : p.plan.row_end(b - 1, static_cast<int>(r));
    for (int64_t i = 0; i < tokens; ++i) {
      // Other threads change other bits.
      if ((load_bits(&ranks[i]) >> r & 1) == 0) continue;
      if (row < most) {
        number(i, static_cast<int>(r), row++);
      } else {
        keep_bits(&ranks[i], ~(Ranks{1} << r));
      }
    }
  });
  team.sync();
}

// Counts the pairs that have a row, per expert, of every block of tokens.
struct CountPairs {
  Control* control;
  PrepareView p;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    if (failed(team, c)) return;
    const PlanView& plan = p.plan;
    const auto* ranks = team.template shared<Ranks>(0);
    auto* pairs_E = team.template shared<int32_t>(shared_ranks());
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

// Turns the counts of pairs into the pairs up to the end of each block.
struct AddPairs {
  Control* control;
  PrepareView p;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    const int64_t first = team.block() * kTokenBlock, left = c.experts - first;
    team.each(left < kTokenBlock ? left : kTokenBlock, [&](int64_t i) {
      const int64_t e = first + i;
      int32_t sum = 0;
      for (int64_t b = 0; b < p.plan.blocks; ++b) {
        int32_t& pairs = p.plan.pair_end_BE[b * c.experts + e];
        pairs = sum += pairs;
      }
      p.plan.count_RE[int64_t{c.rank} * c.experts + e] = sum;
    });
  }
};

// Numbers own rows and pairs (for now in slot_TK), and stores the records of rows for peers.
struct NumberPairs {
  Control* control;
  PrepareView p;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    const PlanView& plan = p.plan;
    const int topk = plan.topk;
    const auto* ranks = team.template shared<Ranks>(0);
    auto* pairs_E = team.template shared<int32_t>(shared_ranks());
    auto* expert_P = team.template shared<int16_t>(round_up(shared_counts(c.experts), 8));
    for (int64_t b = team.block(); b < plan.blocks; b += team.blocks()) {
      const int64_t first = b * kTokenBlock, tokens = p.tokens_of(b), pairs = tokens * topk;
      team.sync();
      team.each(tokens * c.ranks, [&](int64_t i) { plan.row_TR[first * c.ranks + i] = -1; });
      number_rows(team, c, p, b, [&](int64_t i, int r, int64_t row) {
        plan.row_TR[(first + i) * c.ranks + r] = static_cast<int32_t>(row);
        if (r == c.rank) plan.token(r, row) = static_cast<int32_t>(first + i);
      });
      team.each(c.experts, [&](int64_t e) {
        pairs_E[e] = b == 0 ? 0 : plan.pair_end_BE[(b - 1) * c.experts + e];
      });
      team.each(pairs, [&](int64_t i) {
        const int e = p.expert(c, first + i / topk, i % topk);
        const bool has_row = e >= 0 && (ranks[i / topk] >> c.map.owner_E[e] & 1);
        expert_P[i] = static_cast<int16_t>(has_row ? e : -1);
        if (!has_row) plan.slot_TK[first * topk + i] = -1;
      });
      team.sync();
      // A thread counts the pairs of its experts.
      team.each(kCounters, [&](int64_t counter) {
        for (int64_t i = 0; i < pairs; ++i) {
          const int e = expert_P[i];
          if (e >= 0 && e % kCounters == counter) plan.slot_TK[first * topk + i] = pairs_E[e]++;
        }
      });
      team.sync();
      team.each_warp(tokens, [&](auto& warp, int64_t i) {
        for (int r = 0; r < c.ranks; ++r) {
          if (r != c.rank && (ranks[i] >> r & 1)) send(warp, c, r, first + i, expert_P + i * topk);
        }
      });
    }
  }

 private:
  static constexpr int kCounters = 256;

  template <class Warp>
  MOIETY_STEP void send(Warp& warp, const Control& c, int r, int64_t t,
                        const int16_t* expert_K) const {
    const PlanView& plan = p.plan;
    std::byte* out = c.message(r, c.rank) + head_bytes(c.experts, c.ranks) +
                     plan.row_TR[t * c.ranks + r] * routing_bytes(plan.topk);
    warp.each(2 * int64_t{plan.topk} + 2, [&](int64_t i) {
      const int64_t k = i / 2 - 1;
      int32_t value = i == 0 ? static_cast<int32_t>(t) : 0;
      if (k >= 0) {
        const int e = expert_K[k];
        const bool here = e >= 0 && c.map.owner_E[e] == r;
        const int32_t choice[2] = {here ? c.map.local_E[e] : -1,
                                   here ? plan.slot_TK[t * plan.topk + k] : 0};
        value = choice[i % 2];
      }
      store(out + 4 * i, value);
    });
  }
};

// Exchanges heads and counts with all peers. One block.
struct ExchangeHeads {
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

// Finds how many pairs of each expert are kept, and where they go (trim.h). Block r does so for the
// experts of rank r.
struct TrimExperts {
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
    int64_t limit = wanted, rest = 0;
    if (wanted > room) {
      int64_t low = 0;  // used(low) <= room < used(limit)
      while (limit - low > 1) {
        const int64_t middle = (low + limit) / 2;
        (used(middle) <= room ? low : limit) = middle;
      }
      limit = low;
      rest = room - used(limit);
    }
    team.one([&] { place(c, r, limit, rest, wanted * alignment); });
  }

 private:
  MOIETY_STEP void place(const Control& c, int r, int64_t limit, int64_t rest,
                         int64_t required) const {
    const Scratch& at = c.scratch;
    const int64_t alignment = p.plan.alignment;
    const int32_t* experts = c.map.by_owner_E + c.map.begin_R[r];
    int64_t offset = 0, dropped = 0, most = -1;
    at.largest_R[r] = 0;
    for (int i = 0; i < c.map.count(r); ++i) {
      const int e = experts[i];
      const int64_t count = at.count_E[e];
      int64_t blocks = ceil_div(count, alignment);
      if (blocks > limit) {
        blocks = limit + (rest > 0);
        rest -= rest > 0;
      }
      const int64_t kept = count < blocks * alignment ? count : blocks * alignment;
      at.kept_E[e] = static_cast<int32_t>(kept);
      at.offset_E[e] = static_cast<int32_t>(offset);
      offset += round_up(kept, alignment);
      dropped += count - kept;
      if (count > most) {
        most = count;
        at.largest_R[r] = e;
      }
    }
    at.required_R[r] = required;
    at.dropped_R[r] = dropped;
  }
};

// Writes the plan's counts and info, and records errors, which are equal on all ranks. One block.
struct WriteCounts {
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
  Control* control;
  PrepareView p;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    const PlanView& plan = p.plan;
    for (int64_t b = team.block(); b < plan.blocks; b += team.blocks()) {
      team.each_warp(p.tokens_of(b),
                     [&](auto& warp, int64_t i) { find_own(warp, c, b * kTokenBlock + i); });
    }
    for (int s = 0; s < c.ranks; ++s) {
      if (s == c.rank) continue;
      const int64_t rows = plan.rows(s, c.rank);
      for (int64_t first = team.block() * kTokenBlock; first < rows;
           first += team.blocks() * kTokenBlock) {
        const int64_t left = rows - first;
        team.each_warp(left < kTokenBlock ? left : kTokenBlock,
                       [&](auto& warp, int64_t i) { find_received(warp, c, s, first + i); });
      }
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
    const auto slot = [&](int64_t k) {
      const int32_t number = slot_K[k];
      return number < 0 ? -1 : slot_of(c, c.rank, p.expert(c, t, k), number);
    };
    const auto owner = [&](int64_t k) { return c.map.owner_E[p.expert(c, t, k)]; };
    warp.sync();  // all lanes have the row
    warp.each(c.ranks, [&](int64_t r) {
      bool any = false;
      for (int k = 0; k < plan.topk; ++k) any = any || (slot(k) >= 0 && owner(k) == r);
      if (!any) row_R[r] = -1;
    });
    warp.sync();  // all lanes have read the numbers
    warp.each(plan.topk, [&](int64_t k) {
      const int32_t here = slot(k);
      const int32_t of = here < 0 ? -1 : owner(k);
      slot_K[k] = here;
      plan.owner_TK[t * plan.topk + k] = of;
      if (own_row < 0) return;
      plan.slots(c.rank, own_row)[k] = of == c.rank ? here : -1;
      if (of == c.rank) {
        plan.slot_row[here] = static_cast<int32_t>(c.rank * plan.tokens_max + own_row);
      }
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
