// Expert rows to tokens among GPU ranks: combine and dispatch_backward. An owner's partial sums
// (kToken: its rows) go home, chunk by chunk, and the home sums them in the order of
// docs/spec/ep.md#rows-and-sums.
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
};

template <class T>
struct SumParts {
  SumRows a;

  MOIETY_STEP const std::byte* row(int64_t slot) const { return a.y + slot * a.y_stride; }
  MOIETY_STEP float weight(int64_t slot) const { return load<float>(a.slot_w + slot * a.w_stride); }
  MOIETY_STEP void add_own(EightSum& sum, int64_t slot, int64_t c) const {
    const Held<T> x = load_eight<T>(row(slot), c, a.model, a.wide);
    a.weighted ? sum.add_weighted(weight(slot), x) : sum.add(x);
  }
  // The sum over live pairs, as it is before it goes over the wire. At an element that is not there
  // it is without meaning.
  template <class Live>
  MOIETY_STEP EightSum partial(const Live& live, int64_t c) const {
    EightSum sum;
    live.batches([&](bool first, int n, auto&& slot) {
      Held<T> held[kBatch];
      float w[kBatch];
      MOIETY_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (i >= n || c >= a.model) continue;
        held[i] = load_eight<T>(row(slot(i)), c, a.model, a.wide);
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
  // The pieces of a row, each of a warp, whose lanes have an octet.
  MOIETY_HD_INLINE int64_t pieces() const { return ceil_div(a.model, 32 * kEight); }
  // Calls f(first element) for the octets of a piece, also for those that are not there.
  template <class Warp, class F>
  MOIETY_STEP void for_octets(Warp& warp, int64_t piece, F&& f) const {
    warp.lanes([&](int lane) { f((piece * 32 + lane) * kEight); });
  }

 private:
  static constexpr int kBatch = 8;  // terms that wait for memory together
};

// Stores the parts of other homes' sums there.
template <class T>
struct PushSums {
  static constexpr int kThreads = 512;
  Control* control;
  PlanView plan;
  SumParts<T> sums;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
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
      const int64_t pieces = sums.pieces();
      team.each_warp((end - begin) * pieces, [&](auto& warp, int64_t at) {
        const Split split(at, pieces);
        const int64_t j = begin + split.item, piece = split.rest;
        const int32_t* slot_K = plan.slots(home, j);
        if (sums.a.by_token) {
          send_pairs(warp, c, home, j, slot_K, piece);
        } else {
          send_partial(warp, c.record(home, c.rank, j, sums.a.record), slot_K, piece);
        }
      });
      team.sync();
      team.one([&] { store_release(c.ready_word(home, c.rank, task.chunk), c.entry.word); });
    }
  }

 private:
  template <class Warp>
  MOIETY_STEP void send_partial(Warp& warp, std::byte* record, const int32_t* slot_K,
                                int64_t piece) const {
    const SumRows& a = sums.a;
    const auto live = warp.live(plan.topk, [&](int64_t k) { return slot_K[k]; });
    if (live.count() == 0) return;
    const bool copy = !a.weighted && live.count() == 1 && !a.wire_fp32;  // so NaN keep their bits
    sums.for_octets(warp, piece, [&](int64_t c) {
      if (copy) {
        live.each([&](int, int64_t slot) {
          if (c >= a.model) return;
          store_eight(record, c, a.model, a.whole,
                      load_eight<T>(sums.row(slot), c, a.model, a.wide));
        });
        return;
      }
      const EightSum sum = sums.partial(live, c);
      if (c >= a.model) return;
      if (a.wire_fp32) {
        store_eight(record, c, a.model, a.whole, sum.template round<float>());
      } else {
        store_eight(record, c, a.model, a.whole, sum.template round<T>());
      }
    });
    if (!a.has_side || piece > 0) return;
    warp.each(plan.topk, [&](int64_t k) {
      const bool live = slot_K[k] >= 0;
      store(record + a.side_at + 4 * k,
            live ? load<uint32_t>(a.side + slot_K[k] * a.side_stride) : uint32_t{0});
    });
  }

  template <class Warp>
  MOIETY_STEP void send_pairs(Warp& warp, const Control& c, int home, int64_t j,
                              const int32_t* slot_K, int64_t piece) const {
    const SumRows& a = sums.a;
    const int64_t pair = int64_t{plan.token(home, j)} * plan.topk;
    for (int k = 0; k < plan.topk; ++k) {
      const int64_t slot = slot_K[k];
      if (slot < 0) continue;
      std::byte* record = c.pair_record(home, pair + k, a.record);
      sums.for_octets(warp, piece, [&](int64_t at) {
        if (at >= a.model) return;
        store_eight(record, at, a.model, a.whole,
                    load_eight<T>(sums.row(slot), at, a.model, a.wide));
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
  static constexpr int kThreads = 256;
  Control* control;
  PlanView plan;
  SumParts<T> sums;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    const int64_t pieces = sums.pieces();
    team.grid_warps(plan.tokens * pieces, [&](auto& warp, int64_t i) {
      const Split split(i, pieces);
      take(warp, c, split.item, split.rest);
    });
  }

 private:
  template <class Warp>
  MOIETY_STEP void take(Warp& warp, const Control& c, int64_t t, int64_t piece) const {
    const SumRows& a = sums.a;
    const int32_t* slot_K = plan.slot_TK + t * plan.topk;
    const int32_t* owner_K = plan.owner_TK + t * plan.topk;
    const auto own = warp.live(
        plan.topk, [&](int64_t k) { return owner_K[k] == c.rank ? slot_K[k] : int32_t{-1}; });
    std::byte* out = a.out + t * a.out_stride;
    const bool copy =
        !a.weighted && !a.has_addend && sizeof(T) == sizeof(Out) && plan.alive(slot_K) == 1;
    sums.for_octets(warp, piece, [&](int64_t at) {
      EightSum sum;
      if (!copy && !a.by_token) sum = by_rank(c, own, t, at);
      if (at >= a.model) return;
      if (copy) return store_eight(out, at, a.model, a.wide, the_term(c, t, at));
      if (a.by_token) sum = by_token(c, t, at);
      if (a.has_addend) {
        const std::byte* addend = a.addend + t * a.addend_stride;
        if (a.addend_fp32) {
          sum.add(load_eight<float>(addend, at, a.model, a.wide));
        } else {
          sum.add(load_eight<T>(addend, at, a.model, a.wide));
        }
      }
      store_eight(out, at, a.model, a.wide, sum.template round<Out>());
    });
    if (piece > 0) return;
    if (!a.has_side) return;
    warp.each(plan.topk, [&](int64_t k) {
      uint32_t value = 0;
      if (slot_K[k] >= 0) {
        value =
            load<uint32_t>(owner_K[k] == c.rank ? a.side + slot_K[k] * a.side_stride
                                                : side_of(c, t, static_cast<int>(k), owner_K[k]));
      }
      store(a.side_out + t * a.side_out_stride + 4 * k, value);
    });
  }

  MOIETY_STEP const std::byte* pair(const Control& c, int64_t t, int k) const {
    return c.pair_record(c.rank, t * plan.topk + k, sums.a.record);
  }
  MOIETY_STEP const std::byte* part(const Control& c, int64_t t, int r) const {
    return c.record(c.rank, r, plan.row_TR[t * c.ranks + r], sums.a.record);
  }
  MOIETY_STEP const std::byte* side_of(const Control& c, int64_t t, int k, int owner) const {
    return sums.a.by_token ? pair(c, t, k) + sums.a.side_at
                           : part(c, t, owner) + sums.a.side_at + 4 * k;
  }

  // The only term of a token's sum, with its bits.
  MOIETY_STEP Held<Out> the_term(const Control& c, int64_t t, int64_t at) const {
    const SumRows& a = sums.a;
    int k = 0;
    while (plan.slot_TK[t * plan.topk + k] < 0) ++k;
    const int owner = plan.owner_TK[t * plan.topk + k];
    Held<Out> out;
    if (owner != c.rank && a.wire_fp32) {
      const Held<float> x = load_eight<float>(part(c, t, owner), at, a.model, a.whole);
      for (int i = 0; i < kEight; ++i) out.x[i] = narrowed<Out>(x.x[i]);
      return out;
    }
    const std::byte* from = owner == c.rank ? sums.row(plan.slot_TK[t * plan.topk + k])
                            : a.by_token    ? pair(c, t, k)
                                            : part(c, t, owner);
    return load_eight<Out>(from, at, a.model, owner == c.rank ? a.wide : a.whole);
  }

  MOIETY_STEP EightSum by_token(const Control& c, int64_t t, int64_t at) const {
    const SumRows& a = sums.a;
    EightSum sum;
    for (int k = 0; k < plan.topk; ++k) {
      const int64_t slot = plan.slot_TK[t * plan.topk + k];
      if (slot < 0) continue;
      if (plan.owner_TK[t * plan.topk + k] == c.rank) {
        sums.add_own(sum, slot, at);
        continue;
      }
      const std::byte* record = pair(c, t, k);
      const Held<T> x = load_eight<T>(record, at, a.model, a.whole);
      a.weighted ? sum.add_weighted(load<float>(record + a.side_at), x) : sum.add(x);
    }
    return sum;
  }

  template <class Live>
  MOIETY_STEP EightSum by_rank(const Control& c, const Live& own, int64_t t, int64_t at) const {
    const SumRows& a = sums.a;
    const bool there = at < a.model;
    EightSum sum;
    for (int r = 0; r < c.ranks; ++r) {
      if (r == c.rank) {
        if (own.count() == 0) continue;
        const EightSum part = sums.partial(own, at);
        a.wire_fp32 ? sum.add(part.template round<float>()) : sum.add(part.template round<T>());
      } else if (plan.row_TR[t * c.ranks + r] >= 0 && there) {
        if (a.wire_fp32) {
          sum.add(load_eight<float>(part(c, t, r), at, a.model, a.whole));
        } else {
          sum.add(load_eight<T>(part(c, t, r), at, a.model, a.whole));
        }
      }
    }
    return sum;
  }
};

}  // namespace moiety::moe::peers
