// Expert rows to tokens among GPU ranks: combine and dispatch_backward. An owner's partial sums
// (kToken: its rows) go home, chunk by chunk, and the home sums them in the order of
// docs/spec/ep.md#rows-and-sums. Rows of direct owners are read where they lie.
#pragma once

#include "moiety/moe/peers/sum_rows.h"

namespace moiety::moe::peers {

// What the steps at home share.
template <class T, class Out>
struct HomeSums {
  Control* control;
  PlanView plan;
  SumRows a;

 protected:
  // Whether a sum of one term keeps its bits.
  MOIETY_STEP bool may_copy() const {
    return !a.weighted && !a.has_addend && sizeof(T) == sizeof(Out);
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
  // The record of pair (t, k), whose owner is another rank.
  MOIETY_STEP const std::byte* pair(const Control& c, int64_t t, int k, int owner) const {
    int number = 0;
    for (int i = 0; i < k && c.boxes; ++i) {
      const int64_t other = t * plan.topk + i;
      number += plan.slot_TK[other] >= 0 && plan.owner_TK[other] == owner;
    }
    const int32_t row = plan.row_TR[t * c.ranks + owner];
    return c.pair_record(c.rank, owner, {t * plan.topk + k, row, number, plan.topk}, a.record);
  }
  MOIETY_STEP const std::byte* part(const Control& c, int64_t t, int r) const {
    return c.record(c.rank, r, plan.row_TR[t * c.ranks + r], a.record);
  }
  MOIETY_STEP const std::byte* side_of(const Control& c, int64_t t, int k, int owner) const {
    return a.by_token ? pair(c, t, k, owner) + a.side_at : part(c, t, owner) + a.side_at + 4 * k;
  }
  // Calls take(warp, token, number) for the pieces of the sums, `each` together; the first of a token
  // brings its values, too.
  template <class Team, class Take>
  MOIETY_STEP void for_pieces(Team& team, const Control& c, int64_t each, Take&& take) const {
    const int64_t pieces = ceil_div(a.pieces(), each);
    team.grid_warps(plan.tokens * pieces, [&](auto& warp, int64_t i) {
      const Split split(i, pieces);
      take(warp, split.item, split.rest);
      if (split.rest == 0 && a.has_side) take_side(warp, c, split.item);
    });
  }
};

// Sums at home.
template <class T, class Out>
struct TakeSums : HomeSums<T, Out> {
  static constexpr int kThreads = 256, kResident = 2;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    const Near near = near_of(c);
    with_parts<T>(a, [&](const auto& sums) {
      if (a.by_token) {
        this->for_pieces(team, c, 1, [&](auto& warp, int64_t t, int64_t piece) {
          const bool copy = copies(t);
          sums.for_octets(warp, piece, [&](int64_t at) {
            if (at >= a.model) return;
            if (copy) return put(sums, t, at, the_pair(c, sums, t, at));
            finish(sums, t, at, by_token(c, sums, t, at));
          });
        });
      } else {
        constexpr int kPieces = kPiecesOf<decltype(sums)>;
        this->for_pieces(team, c, kPieces, [&](auto& warp, int64_t t, int64_t piece) {
          take_by_rank<kPieces>(warp, c, near, sums, t, piece);
        });
      }
    });
  }

 private:
  using Home = HomeSums<T, Out>;
  using Home::a, Home::plan, Home::control, Home::may_copy, Home::put, Home::finish, Home::pair,
      Home::part;

  // Pieces of a row that a warp takes at once, so that it looks up the places of rows but once.
  template <class Sums>
  static constexpr int kPiecesOf = std::decay_t<Sums>::kVectors ? 2 : 1;
  // Parts of the first peers that wait for memory together with the own rows.
  static constexpr int kTogether = sizeof(T) == 2 ? 2 : 1;

  // What a thread needs of a control for every row, and keeps: behind a store it would read all of it
  // anew.
  struct Near {
    int rank, ranks;
    const std::byte* part_P[kTogether];  // the first records of these peers
  };
  MOIETY_STEP Near near_of(const Control& c) const {
    Near out{c.rank, c.ranks, {}};
    MOIETY_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      const int r = i < out.rank ? i : i + 1;
      if (r < out.ranks && !a.by_token) out.part_P[i] = c.record(out.rank, r, 0, a.record);
    }
    return out;
  }

  MOIETY_STEP bool copies(int64_t t) const {
    return may_copy() && plan.alive(plan.slot_TK + t * plan.topk) == 1;
  }
  template <int n, class Warp, class Sums>
  MOIETY_STEP void take_by_rank(Warp& warp, const Control& c, const Near& near, const Sums& sums,
                                int64_t t, int64_t piece) const {
    const int32_t* slot_K = plan.slot_TK + t * plan.topk;
    const int32_t* owner_K = plan.owner_TK + t * plan.topk;
    int32_t row_P[kTogether];
    MOIETY_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      const int r = i < near.rank ? i : i + 1;
      row_P[i] = r < near.ranks ? plan.row_TR[t * near.ranks + r] : -1;
    }
    const auto own = warp.live(
        plan.topk, [&](int64_t k) { return owner_K[k] == near.rank ? slot_K[k] : int32_t{-1}; });
    const bool copy =
        may_copy() && warp.live(plan.topk, [&](int64_t k) { return slot_K[k]; }).count() == 1;
    warp.lanes([&](int lane) {
      int64_t at[n];
      MOIETY_UNROLL
      for (int q = 0; q < n; ++q) at[q] = ((piece * n + q) * 32 + lane) * kEight;
      EightSum sum[n];
      if (!copy) by_rank(c, near, sums, own, row_P, t, at, sum);
      MOIETY_UNROLL
      for (int q = 0; q < n; ++q) {
        if (at[q] >= a.model) continue;
        copy ? put(sums, t, at[q], the_term(c, sums, t, at[q])) : finish(sums, t, at[q], sum[q]);
      }
    });
  }
  // Elements of the row of pair (t, k), whose owner is another rank.
  MOIETY_STEP Held<T> of_peer(const Control& c, int64_t t, int k, int owner, int64_t slot,
                              int64_t at) const {
    const bool pulled = c.pulled(owner);
    const std::byte* row = pulled ? c.direct_R[owner].row(slot) : pair(c, t, k, owner);
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
    return held_of<Out>([&](int i) { return narrowed<Out>(element(x, i)); });
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
        sum.add_weighted(own ? sums.weight(slot) : load<float>(pair(c, t, k, owner) + a.side_at),
                         x);
      } else {
        sum.add(x);
      }
    }
    return sum;
  }

  template <int n, class Sums, class Live>
  MOIETY_STEP void by_rank(const Control& c, const Near& near, const Sums& sums, const Live& own,
                           const int32_t (&row_P)[kTogether], int64_t t, const int64_t (&at)[n],
                           EightSum (&sum)[n]) const {
    const bool holds = Sums::kVectors && !a.wire_fp32;
    Held<T> held[kTogether][n];
    const auto for_held = [&](auto&& use) {
      MOIETY_UNROLL
      for (int k = 0; k < kTogether * n; ++k) {
        const int i = k / n, q = k % n;
        if (holds && row_P[i] >= 0 && at[q] < a.model) use(i, q);
      }
    };
    for_held([&](int i, int q) {
      held[i][q] =
          load_eight<T>(near.part_P[i] + row_P[i] * a.record, at[q], a.model, sums.whole());
    });
    const auto add_held = [&](bool before) {
      for_held([&](int i, int q) {
        if ((i < near.rank) == before) sum[q].add(held[i][q]);
      });
    };
    const auto add_others = [&](int begin, int end) {
      for (int r = begin; r < end; ++r) {
        if (plan.row_TR[t * near.ranks + r] < 0) continue;
        MOIETY_UNROLL
        for (int q = 0; q < n; ++q) {
          if (at[q] >= a.model) continue;
          if (a.wire_fp32) {
            sum[q].add(load_eight<float>(part(c, t, r), at[q], a.model, sums.whole()));
          } else {
            sum[q].add(load_eight<T>(part(c, t, r), at[q], a.model, sums.whole()));
          }
        }
      }
    };
    const int held_before = holds ? kTogether : 0, held_behind = holds ? kTogether + 1 : 0;
    add_held(true);
    add_others(held_before, near.rank);
    if (own.count() > 0) {
      EightSum part[n];
      sums.partials(own, at, part);
      MOIETY_UNROLL
      for (int q = 0; q < n; ++q) {
        a.wire_fp32 ? sum[q].add(part[q].template round<float>())
                    : sum[q].add(part[q].template round<T>());
      }
    }
    add_held(false);
    add_others(held_behind > near.rank ? held_behind : near.rank + 1, near.ranks);
  }
};

}  // namespace moiety::moe::peers
