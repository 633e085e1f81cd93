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
  int32_t run;       // pieces of a row that a warp sums one after the other
  bool wide, whole;  // load_eight's `wide` for the tensors, for records
  bool weighted, has_side, has_addend, wire_fp32, addend_fp32, by_token;

  MOIETY_HD_INLINE int64_t pieces() const { return ceil_div(model, int64_t{32 * kEight}); }
  MOIETY_HD_INLINE int64_t runs() const { return ceil_div(pieces(), int64_t{run}); }
};

// `all_wide`: all rows are whole octets, known when it is compiled.
template <class T, bool all_wide>
struct SumParts {
  const SumRows& a;

  MOIETY_STEP bool wide() const { return all_wide || a.wide; }
  MOIETY_STEP bool whole() const { return all_wide || a.whole; }
  MOIETY_STEP const std::byte* row(int64_t slot) const { return a.y + slot * a.y_stride; }
  MOIETY_STEP float weight(int64_t slot) const { return load<float>(a.slot_w + slot * a.w_stride); }
  MOIETY_STEP Held<T> own(int64_t slot, int64_t c) const {
    return load_eight<T>(row(slot), c, a.model, wide());
  }
  template <class X>
  MOIETY_STEP Held<X> came(const std::byte* record, int64_t c) const {
    return load_eight<X>(record, c, a.model, whole());
  }
  // The sum over live pairs, as it is before it goes over the wire. At an element that is not there
  // it is without meaning.
  template <class Live>
  MOIETY_STEP EightSum partial(const Live& live, int64_t c) const {
    EightSum sum;
    live.batches([&](bool first, int n, auto&& slot, auto&& weight) {
      Held<T> held[kBatch];
      MOIETY_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (i < n && c < a.model) held[i] = own(slot(i), c);
      }
      MOIETY_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (i >= n) continue;
        sum.any = i > 0 || !first;
        a.weighted ? sum.add_weighted(weight(i), held[i]) : sum.add(held[i]);
      }
    });
    return sum;
  }
  // Rows are summed in pieces whose octets the lanes of a warp have, and runs of such.
  MOIETY_STEP int64_t runs() const { return a.runs(); }
  // Calls f(first element) for the octets of a run, also for those that are not there.
  template <class Warp, class F>
  MOIETY_STEP void for_octets(Warp& warp, int64_t run, F&& f) const {
    for (int64_t piece = run * a.run; piece < (run + 1) * a.run && piece * 32 * kEight < a.model;
         ++piece) {
      warp.lanes([&](int lane) { f((piece * 32 + lane) * kEight); });
    }
  }
  // The live ones of the slots, with their weights.
  template <class Warp, class Slot>
  MOIETY_STEP auto live(Warp& warp, int topk, Slot&& slot_of) const {
    return warp.live(topk, slot_of, [&](int64_t slot) { return a.weighted ? weight(slot) : 1.0f; });
  }
};

// Stores the parts of other homes' sums there.
template <class T>
struct PushSums {
  PlanView plan;
  SumRows rows;

  template <class Team>
  MOIETY_STEP void operator()(Team& team, const Control& c) const {
    if (rows.wide) return push<true>(team, c);
    push<false>(team, c);
  }

 private:
  template <bool all_wide, class Team>
  MOIETY_STEP void push(Team& team, const Control& c) const {
    const SumParts<T, all_wide> sums{rows};
    const int64_t runs = sums.runs();
    for_chunks(
        team, c, [&](int r) { return plan.rows(r, c.rank); },
        [&](const ChunkTask& task, int64_t begin, int64_t count) {
          const int home = task.peer;
          team.each_warp(count * runs, [&](auto& warp, int64_t at) {
            const Split split(at, runs);
            const int64_t j = begin + split.item, run = split.rest;
            const int32_t* slot_K = plan.slots(home, j);
            if (rows.by_token) {
              send_pairs(warp, c, sums, home, j, slot_K, run);
            } else {
              send_partial(warp, sums, c.record(home, c.rank, j, rows.record), slot_K, run);
            }
          });
          team.sync();
          team.one([&] { store_release(c.ready_word(home, c.rank, task.chunk), c.entry.word); });
        });
  }

  template <class Warp, class Sums>
  MOIETY_STEP void send_partial(Warp& warp, const Sums& sums, std::byte* record,
                                const int32_t* slot_K, int64_t run) const {
    const SumRows& a = rows;
    const auto live = sums.live(warp, plan.topk, [&](int64_t k) { return slot_K[k]; });
    if (live.count() == 0) return;
    const bool copy = !a.weighted && live.count() == 1 && !a.wire_fp32;  // so NaN keep their bits
    if (copy) {
      live.each([&](int, int64_t slot) {
        sums.for_octets(warp, run, [&](int64_t c) {
          if (c < a.model) store_eight(record, c, a.model, sums.whole(), sums.own(slot, c));
        });
      });
    } else {
      sums.for_octets(warp, run, [&](int64_t c) {
        const EightSum sum = sums.partial(live, c);
        if (c >= a.model) return;
        if (a.wire_fp32) {
          store_eight(record, c, a.model, sums.whole(), sum.template round<float>());
        } else {
          store_eight(record, c, a.model, sums.whole(), sum.template round<T>());
        }
      });
    }
    if (!a.has_side || run > 0) return;
    warp.each(plan.topk, [&](int64_t k) {
      const bool live = slot_K[k] >= 0;
      store(record + a.side_at + 4 * k,
            live ? load<uint32_t>(a.side + slot_K[k] * a.side_stride) : uint32_t{0});
    });
  }

  template <class Warp, class Sums>
  MOIETY_STEP void send_pairs(Warp& warp, const Control& c, const Sums& sums, int home, int64_t j,
                              const int32_t* slot_K, int64_t run) const {
    const SumRows& a = rows;
    const int64_t pair = int64_t{plan.token(home, j)} * plan.topk;
    for (int k = 0; k < plan.topk; ++k) {
      const int64_t slot = slot_K[k];
      if (slot < 0) continue;
      std::byte* record = c.pair_record(home, pair + k, a.record);
      sums.for_octets(warp, run, [&](int64_t at) {
        if (at >= a.model) return;
        store_eight(record, at, a.model, sums.whole(), sums.own(slot, at));
      });
      const std::byte* value = a.weighted   ? a.slot_w + slot * a.w_stride
                               : a.has_side ? a.side + slot * a.side_stride
                                            : nullptr;
      if (value && run == 0) warp.one([&] { store(record + a.side_at, load<uint32_t>(value)); });
    }
  }
};

// Sums at home.
template <class T, class Out>
struct TakeSums {
  static constexpr int kThreads = 384, kBlocks = 2;
  static constexpr bool kHome = true;
  Control* control;
  PlanView plan;
  SumRows rows;

  template <class Team>
  MOIETY_STEP void operator()(Team& team, Control& c, Taking taking) const {
    if (rows.wide) return take<true>(team, c, taking);
    take<false>(team, c, taking);
  }

 private:
  template <bool all_wide, class Team>
  MOIETY_STEP void take(Team& team, Control& c, Taking taking) const {
    const SumParts<T, all_wide> sums{rows};
    const int64_t runs = sums.runs();
    take_share(
        team, c, taking, plan.tokens * runs,
        [&](auto& warp, int64_t i) {
          const int32_t* row_R = plan.row_TR + Split(i, runs).item * c.ranks;
          return warp.all(c.ranks, [&](int64_t r) {
            const int64_t row = r == c.rank ? -1 : row_R[r];
            return row < 0 || has_come(c, static_cast<int>(r), Split(row, c.chunk_rows).item);
          });
        },
        [&](auto& warp, int64_t i) {
          const Split split(i, runs);
          take(warp, c, sums, split.item, split.rest);
        });
  }

  template <class Warp, class Sums>
  MOIETY_STEP void take(Warp& warp, const Control& c, const Sums& sums, int64_t t,
                        int64_t run) const {
    const SumRows& a = rows;
    const int32_t* slot_K = plan.slot_TK + t * plan.topk;
    const int32_t* owner_K = plan.owner_TK + t * plan.topk;
    const auto all = warp.live(
        plan.topk, [&](int64_t k) { return slot_K[k]; }, [](int64_t) { return 1.0f; });
    std::byte* out = a.out + t * a.out_stride;
    const auto finish = [&](EightSum& sum, int64_t at) {
      if (a.has_addend) {
        const std::byte* addend = a.addend + t * a.addend_stride;
        if (a.addend_fp32) {
          sum.add(load_eight<float>(addend, at, a.model, sums.wide()));
        } else {
          sum.add(load_eight<T>(addend, at, a.model, sums.wide()));
        }
      }
      store_eight(out, at, a.model, sums.wide(), sum.template round<Out>());
    };
    if (!a.weighted && !a.has_addend && sizeof(T) == sizeof(Out) && all.count() == 1) {
      sums.for_octets(warp, run, [&](int64_t at) {
        if (at < a.model) store_eight(out, at, a.model, sums.wide(), the_term(c, sums, t, at));
      });
    } else if (a.by_token) {
      sums.for_octets(warp, run, [&](int64_t at) {
        if (at >= a.model) return;
        EightSum sum = by_token(c, sums, t, at);
        finish(sum, at);
      });
    } else {
      const auto own = sums.live(warp, plan.topk, [&](int64_t k) {
        return owner_K[k] == c.rank ? slot_K[k] : int32_t{-1};
      });
      const FirstPart first = first_part(c, t);
      sums.for_octets(warp, run, [&](int64_t at) {
        EightSum sum = by_rank(c, sums, own, first, t, at);
        if (at < a.model) finish(sum, at);
      });
    }
    if (run > 0 || !a.has_side) return;
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
    return c.pair_record(c.rank, t * plan.topk + k, rows.record);
  }
  MOIETY_STEP const std::byte* part(const Control& c, int64_t t, int r) const {
    return c.record(c.rank, r, plan.row_TR[t * c.ranks + r], rows.record);
  }
  MOIETY_STEP const std::byte* side_of(const Control& c, int64_t t, int k, int owner) const {
    return rows.by_token ? pair(c, t, k) + rows.side_at : part(c, t, owner) + rows.side_at + 4 * k;
  }

  // The part of the first peer that has one, which is read ahead of the others: often it is the
  // only one.
  struct FirstPart {
    int rank = -1;
    const std::byte* record = nullptr;
  };
  MOIETY_STEP FirstPart first_part(const Control& c, int64_t t) const {
    if (rows.by_token || rows.wire_fp32) return {};
    for (int r = 0; r < c.ranks; ++r) {
      if (r != c.rank && plan.row_TR[t * c.ranks + r] >= 0) return {r, part(c, t, r)};
    }
    return {};
  }

  // The only term of a token's sum, with its bits.
  template <class Sums>
  MOIETY_STEP Held<Out> the_term(const Control& c, const Sums& sums, int64_t t, int64_t at) const {
    const SumRows& a = rows;
    int k = 0;
    while (plan.slot_TK[t * plan.topk + k] < 0) ++k;
    const int owner = plan.owner_TK[t * plan.topk + k];
    Held<Out> out;
    if (owner != c.rank && a.wire_fp32) {
      const Held<float> x = sums.template came<float>(part(c, t, owner), at);
      for (int i = 0; i < kEight; ++i) out.x[i] = narrowed<Out>(x.x[i]);
      return out;
    }
    const std::byte* from = owner == c.rank ? sums.row(plan.slot_TK[t * plan.topk + k])
                            : a.by_token    ? pair(c, t, k)
                                            : part(c, t, owner);
    return load_eight<Out>(from, at, a.model, owner == c.rank ? sums.wide() : sums.whole());
  }

  template <class Sums>
  MOIETY_STEP EightSum by_token(const Control& c, const Sums& sums, int64_t t, int64_t at) const {
    const SumRows& a = rows;
    EightSum sum;
    for (int k = 0; k < plan.topk; ++k) {
      const int64_t slot = plan.slot_TK[t * plan.topk + k];
      if (slot < 0) continue;
      if (plan.owner_TK[t * plan.topk + k] == c.rank) {
        const Held<T> x = sums.own(slot, at);
        a.weighted ? sum.add_weighted(sums.weight(slot), x) : sum.add(x);
        continue;
      }
      const std::byte* record = pair(c, t, k);
      const Held<T> x = sums.template came<T>(record, at);
      a.weighted ? sum.add_weighted(load<float>(record + a.side_at), x) : sum.add(x);
    }
    return sum;
  }

  template <class Sums, class Live>
  MOIETY_STEP EightSum by_rank(const Control& c, const Sums& sums, const Live& own,
                               const FirstPart& first, int64_t t, int64_t at) const {
    const SumRows& a = rows;
    const bool there = at < a.model;
    Held<T> ahead;
    if (first.record && there) ahead = sums.template came<T>(first.record, at);
    EightSum sum;
    for (int r = 0; r < c.ranks; ++r) {
      if (r == c.rank) {
        if (own.count() == 0) continue;
        const EightSum part = sums.partial(own, at);
        a.wire_fp32 ? sum.add(part.template round<float>()) : sum.add(part.template round<T>());
      } else if (r == first.rank) {
        if (there) sum.add(ahead);
      } else if (plan.row_TR[t * c.ranks + r] >= 0 && there) {
        if (a.wire_fp32) {
          sum.add(sums.template came<float>(part(c, t, r), at));
        } else {
          sum.add(sums.template came<T>(part(c, t, r), at));
        }
      }
    }
    return sum;
  }
};

}  // namespace moiety::moe::peers
