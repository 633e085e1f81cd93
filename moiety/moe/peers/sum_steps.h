// Expert rows to tokens among GPU ranks: combine and dispatch_backward. An owner's partial sums
// (kToken: its rows) go home, chunk by chunk, and the home sums them in the order of
// docs/spec/ep.md#rows-and-sums. Rows of direct owners are read where they lie.
#pragma once

#include "moiety/moe/combine.h"
#include "moiety/moe/peers/copy_steps.h"
#include "moiety/moe/peers/octets.h"

namespace moiety::moe::peers {

// The tensors of a sum, by bytes. Ranks without tokens, or without slots, have null.
struct SumRows {
  const std::byte *y, *slot_w, *side, *addend;
  std::byte *out, *side_out;
  int64_t y_stride, w_stride, side_stride, addend_stride, out_stride, side_out_stride;
  int64_t model, side_at, record;
  bool wide, whole;  // load_eight's `wide` for the tensors, for records
  bool weighted, has_side, has_addend, wire_fp32, addend_fp32, by_token;

  // The pieces of a row, each of a warp, whose lanes have an octet.
  MOIETY_HD_INLINE int64_t pieces() const { return ceil_div(model, 32 * kEight); }
};

// `vectors`: rows and records are whole octets, so that no lane asks about elements. There are
// bodies of a step for either, since what is rare would take the registers of what is not.
template <class T, bool vectors>
struct SumParts {
  static constexpr bool kVectors = vectors;
  const SumRows& a;

  MOIETY_STEP bool wide() const { return vectors || a.wide; }
  MOIETY_STEP bool whole() const { return vectors || a.whole; }
  MOIETY_STEP const std::byte* row(int64_t slot) const { return a.y + slot * a.y_stride; }
  MOIETY_STEP float weight(int64_t slot) const { return load<float>(a.slot_w + slot * a.w_stride); }
  MOIETY_STEP Held<T> own(int64_t slot, int64_t c) const {
    return load_eight<T>(row(slot), c, a.model, wide());
  }
  // The sum over live pairs, as it is before it goes over the wire. At an element that is not there
  // it is without meaning.
  template <class Live>
  MOIETY_STEP EightSum partial(const Live& live, int64_t c) const {
    EightSum sum;
    live.template batches<kBatch>([&](bool first, int n, auto&& slot) {
      Held<T> held[kBatch];
      float w[kBatch] = {};
      MOIETY_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (i >= n || c >= a.model) continue;
        held[i] = own(slot(i), c);
        w[i] = a.weighted ? weight(slot(i)) : 1;
      }
      MOIETY_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (i >= n) continue;
        sum.any = i > 0 || !first;
        a.weighted ? sum.add_weighted(w[i], held[i]) : sum.add(held[i]);
      }
    });
    return sum;
  }
  // Calls f(first element) for the octets of a piece, also for those that are not there.
  template <class Warp, class F>
  MOIETY_STEP void for_octets(Warp& warp, int64_t piece, F&& f) const {
    warp.lanes([&](int lane) { f((piece * 32 + lane) * kEight); });
  }

 private:
  static constexpr int kBatch = vectors ? 4 : 1;  // terms that wait for memory together
};

// Calls use(SumParts) for the rows.
template <class T, class Use>
MOIETY_STEP void with_parts(const SumRows& a, Use&& use) {
  if (a.wide && a.whole) {
    use(SumParts<T, true>{a});
  } else {
    use(SumParts<T, false>{a});
  }
}

// Stores the parts of other homes' sums there.
template <class T>
struct PushSums {
  static constexpr int kThreads = 512, kResident = 2;
  Control* control;
  PlanView plan;
  SumRows a;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c) || c.pulled(c.rank)) return;
    with_parts<T>(a, [&](const auto& sums) { push(team, c, sums); });
  }

 private:
  template <class Team, class Sums>
  MOIETY_STEP void push(Team& team, const Control& c, const Sums& sums) const {
    int64_t most = 0;
    for (int r = 0; r < c.ranks; ++r) {
      const int64_t n = r == c.rank ? 0 : plan.rows(r, c.rank);
      most = n > most ? n : most;
    }
    const int64_t tasks = c.chunks(most) * (c.ranks - 1);
    for (int64_t i = team.block(); i < tasks; i += team.blocks()) {
      const ChunkTask task = chunk_task(i, c.rank, c.ranks);
      const int home = task.peer;
      const int64_t n = plan.rows(home, c.rank), begin = task.chunk * c.chunk_rows;
      if (begin >= n) continue;
      const int64_t end = begin + c.chunk_rows < n ? begin + c.chunk_rows : n;
      const int64_t pieces = a.pieces();
      team.each_warp((end - begin) * pieces, [&](auto& warp, int64_t at) {
        const Split split(at, pieces);
        const int64_t j = begin + split.item, piece = split.rest;
        const int32_t* slot_K = plan.slots(home, j);
        if (a.by_token) {
          send_pairs(warp, c, sums, home, j, slot_K, piece);
        } else {
          send_partial(warp, sums, c.record(home, c.rank, j, a.record), slot_K, piece);
        }
      });
      team.sync();
      team.one([&] { store_release(c.ready_word(home, c.rank, task.chunk), c.entry.word); });
    }
  }

  template <class Warp, class Sums>
  MOIETY_STEP void send_partial(Warp& warp, const Sums& sums, std::byte* record,
                                const int32_t* slot_K, int64_t piece) const {
    const auto live = warp.live(plan.topk, [&](int64_t k) { return slot_K[k]; });
    if (live.count() == 0) return;
    const bool copy = !a.weighted && live.count() == 1 && !a.wire_fp32;  // so NaN keep their bits
    sums.for_octets(warp, piece, [&](int64_t c) {
      if (copy) {
        const int64_t slot = live.first();
        if (c < a.model) store_eight(record, c, a.model, sums.whole(), sums.own(slot, c));
        return;
      }
      const EightSum sum = sums.partial(live, c);
      if (c >= a.model) return;
      if (a.wire_fp32) {
        store_eight(record, c, a.model, sums.whole(), sum.template round<float>());
      } else {
        store_eight(record, c, a.model, sums.whole(), sum.template round<T>());
      }
    });
    if (!a.has_side || piece > 0) return;
    warp.each(plan.topk, [&](int64_t k) {
      const bool live = slot_K[k] >= 0;
      store(record + a.side_at + 4 * k,
            live ? load<uint32_t>(a.side + slot_K[k] * a.side_stride) : uint32_t{0});
    });
  }

  template <class Warp, class Sums>
  MOIETY_STEP void send_pairs(Warp& warp, const Control& c, const Sums& sums, int home, int64_t j,
                              const int32_t* slot_K, int64_t piece) const {
    const int64_t pair = int64_t{plan.token(home, j)} * plan.topk;
    for (int k = 0; k < plan.topk; ++k) {
      const int64_t slot = slot_K[k];
      if (slot < 0) continue;
      std::byte* record = c.pair_record(home, pair + k, a.record);
      sums.for_octets(warp, piece, [&](int64_t at) {
        if (at < a.model) store_eight(record, at, a.model, sums.whole(), sums.own(slot, at));
      });
      const std::byte* value = a.weighted   ? a.slot_w + slot * a.w_stride
                               : a.has_side ? a.side + slot * a.side_stride
                                            : nullptr;
      if (value && piece == 0) warp.one([&] { store(record + a.side_at, load<uint32_t>(value)); });
    }
  }
};

// Sums at home.
template <class T, class Out>
struct TakeSums {
  static constexpr int kThreads = 256, kResident = 3;
  Control* control;
  PlanView plan;
  SumRows a;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    const int64_t pieces = a.pieces();
    with_parts<T>(a, [&](const auto& sums) {
      const auto for_pieces = [&](auto&& take) {
        team.grid_warps(plan.tokens * pieces, [&](auto& warp, int64_t i) {
          const Split split(i, pieces);
          take(warp, split.item, split.rest);
          if (split.rest == 0 && a.has_side) take_side(warp, c, split.item);
        });
      };
      if (a.by_token) {
        for_pieces([&](auto& warp, int64_t t, int64_t piece) {
          const bool copy = copies(t);
          sums.for_octets(warp, piece, [&](int64_t at) {
            if (at >= a.model) return;
            if (copy) return put(sums, t, at, the_pair(c, sums, t, at));
            finish(sums, t, at, by_token(c, sums, t, at));
          });
        });
      } else {
        for_pieces(
            [&](auto& warp, int64_t t, int64_t piece) { take_by_rank(warp, c, sums, t, piece); });
      }
    });
  }

 private:
  // Parts of the first peers that wait for memory together with the own rows.
  static constexpr int kTogether = sizeof(T) == 2 ? 2 : 1;

  // Whether a token's sum has one term, whose bits are kept.
  MOIETY_STEP bool copies(int64_t t) const {
    return !a.weighted && !a.has_addend && sizeof(T) == sizeof(Out) &&
           plan.alive(plan.slot_TK + t * plan.topk) == 1;
  }
  template <class Sums>
  MOIETY_STEP void put(const Sums& sums, int64_t t, int64_t at, const Held<Out>& x) const {
    store_eight(a.out + t * a.out_stride, at, a.model, sums.wide(), x);
  }
  template <class Sums>
  MOIETY_STEP void finish(const Sums& sums, int64_t t, int64_t at, EightSum sum) const {
    if (a.has_addend) {
      const std::byte* addend = a.addend + t * a.addend_stride;
      if (a.addend_fp32) {
        sum.add(load_eight<float>(addend, at, a.model, sums.wide()));
      } else {
        sum.add(load_eight<T>(addend, at, a.model, sums.wide()));
      }
    }
    put(sums, t, at, sum.template round<Out>());
  }

  template <class Warp, class Sums>
  MOIETY_STEP void take_by_rank(Warp& warp, const Control& c, const Sums& sums, int64_t t,
                                int64_t piece) const {
    const int32_t* slot_K = plan.slot_TK + t * plan.topk;
    const int32_t* owner_K = plan.owner_TK + t * plan.topk;
    int32_t row_P[kTogether];
    MOIETY_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      const int r = i < c.rank ? i : i + 1;
      row_P[i] = r < c.ranks ? plan.row_TR[t * c.ranks + r] : -1;
    }
    const auto own = warp.live(
        plan.topk, [&](int64_t k) { return owner_K[k] == c.rank ? slot_K[k] : int32_t{-1}; });
    const bool copy = copies(t);
    sums.for_octets(warp, piece, [&](int64_t at) {
      if (copy) {
        if (at < a.model) put(sums, t, at, the_term(c, sums, t, at));
        return;
      }
      const EightSum sum = by_rank(c, sums, own, row_P, t, at);
      if (at < a.model) finish(sums, t, at, sum);
    });
  }
  template <class Warp>
  MOIETY_STEP void take_side(Warp& warp, const Control& c, int64_t t) const {
    warp.each(plan.topk, [&](int64_t k) {
      const int64_t slot = plan.slot_TK[t * plan.topk + k];
      const int owner = plan.owner_TK[t * plan.topk + k];
      uint32_t value = 0;
      if (slot >= 0) {
        value = load<uint32_t>(owner == c.rank ? a.side + slot * a.side_stride
                                               : side_of(c, t, static_cast<int>(k), owner));
      }
      store(a.side_out + t * a.side_out_stride + 4 * k, value);
    });
  }

  MOIETY_STEP const std::byte* pair(const Control& c, int64_t t, int k) const {
    return c.pair_record(c.rank, t * plan.topk + k, a.record);
  }
  MOIETY_STEP const std::byte* part(const Control& c, int64_t t, int r) const {
    return c.record(c.rank, r, plan.row_TR[t * c.ranks + r], a.record);
  }
  MOIETY_STEP const std::byte* side_of(const Control& c, int64_t t, int k, int owner) const {
    return a.by_token ? pair(c, t, k) + a.side_at : part(c, t, owner) + a.side_at + 4 * k;
  }
  // Elements of the row of pair (t, k), whose owner is another rank.
  MOIETY_STEP Held<T> of_peer(const Control& c, int64_t t, int k, int owner, int64_t slot,
                              int64_t at) const {
    const bool pulled = c.pulled(owner);
    const std::byte* row = pulled ? c.direct_R[owner].row(slot) : pair(c, t, k);
    const bool aligned = !pulled || reinterpret_cast<uintptr_t>(row) % 16 == 0;
    return load_eight<T>(row, at, a.model, a.whole && aligned);
  }

  // The only live choice of a token.
  MOIETY_STEP int live_choice(int64_t t) const {
    int k = 0;
    while (plan.slot_TK[t * plan.topk + k] < 0) ++k;
    return k;
  }
  MOIETY_STEP static Held<Out> as_out(const Held<T>& x) {
    Held<Out> out = {};
    memcpy(static_cast<void*>(&out), &x, sizeof(x) < sizeof(out) ? sizeof(x) : sizeof(out));
    return out;
  }
  // The only term of a token's sum, with its bits.
  template <class Sums>
  MOIETY_STEP Held<Out> the_pair(const Control& c, const Sums& sums, int64_t t, int64_t at) const {
    const int k = live_choice(t), owner = plan.owner_TK[t * plan.topk + k];
    const int64_t slot = plan.slot_TK[t * plan.topk + k];
    return as_out(owner == c.rank ? sums.own(slot, at) : of_peer(c, t, k, owner, slot, at));
  }
  template <class Sums>
  MOIETY_STEP Held<Out> the_term(const Control& c, const Sums& sums, int64_t t, int64_t at) const {
    const int k = live_choice(t), owner = plan.owner_TK[t * plan.topk + k];
    if (owner == c.rank) return as_out(sums.own(plan.slot_TK[t * plan.topk + k], at));
    if (!a.wire_fp32) return as_out(load_eight<T>(part(c, t, owner), at, a.model, sums.whole()));
    const Held<float> x = load_eight<float>(part(c, t, owner), at, a.model, sums.whole());
    Held<Out> out;
    for (int i = 0; i < kEight; ++i) out.x[i] = narrowed<Out>(x.x[i]);
    return out;
  }

  template <class Sums>
  MOIETY_STEP EightSum by_token(const Control& c, const Sums& sums, int64_t t, int64_t at) const {
    EightSum sum;
    for (int k = 0; k < plan.topk; ++k) {
      const int64_t slot = plan.slot_TK[t * plan.topk + k];
      if (slot < 0) continue;
      const int owner = plan.owner_TK[t * plan.topk + k];
      const bool own = owner == c.rank;
      const Held<T> x = own ? sums.own(slot, at) : of_peer(c, t, k, owner, slot, at);
      if (a.weighted) {
        sum.add_weighted(own ? sums.weight(slot) : load<float>(pair(c, t, k) + a.side_at), x);
      } else {
        sum.add(x);
      }
    }
    return sum;
  }

  template <class Sums, class Live>
  MOIETY_STEP EightSum by_rank(const Control& c, const Sums& sums, const Live& own,
                               const int32_t (&row_P)[kTogether], int64_t t, int64_t at) const {
    const bool there = at < a.model;
    Held<T> held[kTogether];
    MOIETY_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      if (!Sums::kVectors || row_P[i] < 0 || !there || a.wire_fp32) continue;
      const std::byte* record = c.record(c.rank, i < c.rank ? i : i + 1, row_P[i], a.record);
      held[i] = load_eight<T>(record, at, a.model, sums.whole());
    }
    EightSum sum;
    const auto add_held = [&](bool before) {
      MOIETY_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        if (!Sums::kVectors || row_P[i] < 0 || !there || a.wire_fp32) continue;
        if ((i < c.rank) != before) continue;
        sum.add(held[i]);
      }
    };
    const auto add_others = [&](int begin, int end) {
      for (int r = begin; r < end; ++r) {
        if (plan.row_TR[t * c.ranks + r] < 0 || !there) continue;
        if (a.wire_fp32) {
          sum.add(load_eight<float>(part(c, t, r), at, a.model, sums.whole()));
        } else {
          sum.add(load_eight<T>(part(c, t, r), at, a.model, sums.whole()));
        }
      }
    };
    const bool holds = Sums::kVectors && !a.wire_fp32;
    const int held_before = holds ? kTogether : 0, held_behind = holds ? kTogether + 1 : 0;
    add_held(true);
    add_others(held_before, c.rank);
    if (own.count() > 0) {
      const EightSum part = sums.partial(own, at);
      a.wire_fp32 ? sum.add(part.template round<float>()) : sum.add(part.template round<T>());
    }
    add_held(false);
    add_others(held_behind > c.rank ? held_behind : c.rank + 1, c.ranks);
    return sum;
  }
};

}  // namespace moiety::moe::peers
