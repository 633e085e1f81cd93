// The rows of a sum among GPU ranks, and what their owners send home.
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
  bool weighted, has_side, has_addend, wire_fp32, addend_fp32, out_fp32, by_token;

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
  // The sums over live pairs at elements `at`, as they are before they go over the wire. Those at
  // elements that are not there are without meaning.
  template <int n, class Live>
  MOIETY_STEP void partials(const Live& live, const int64_t (&at)[n], EightSum (&sum)[n]) const {
    constexpr int kBatch = vectors ? kWaiting / n : 1;
    live.template batches<kBatch>([&](bool, int terms, auto&& slot) {
      Held<T> held[kBatch][n];
      float w[kBatch] = {};
      MOIETY_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (i >= terms) continue;
        w[i] = a.weighted ? weight(slot(i)) : 1;
        MOIETY_UNROLL
        for (int q = 0; q < n; ++q) {
          if (at[q] < a.model) held[i][q] = own(slot(i), at[q]);
        }
      }
      MOIETY_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (i >= terms) continue;
        MOIETY_UNROLL
        for (int q = 0; q < n; ++q) {
          sum[q].add_weighted(w[i], held[i][q]);
        }
      }
    });
  }
  // Calls f(first element) for the octets of a piece, also for those that are not there.
  template <class Warp, class F>
  MOIETY_STEP void for_octets(Warp& warp, int64_t piece, F&& f) const {
    warp.lanes([&](int lane) { f((piece * 32 + lane) * kEight); });
  }

 private:
  static constexpr int kWaiting = 4;  // octets of terms that wait for memory together
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

// Stores the parts of other homes' sums there; and beside them, if `ahead`, those of this rank's own
// tokens in `out`, where they wait for the others (AddParts): the one is held back by links, the other
// by memory.
template <class T>
struct PushSums {
  static constexpr int kThreads = 512, kResident = 2;
  Control* control;
  PlanView plan;
  SumRows a;
  bool ahead;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c) || c.pulled(c.rank)) return;
    with_parts<T>(a, [&](const auto& sums) { push(team, c, sums); });
  }

 private:
  // Where a part goes, as T or as fp32; `whole`: load_eight's `wide`.
  struct PartPlace {
    std::byte* to;
    bool fp32, whole;
  };

  template <class Team, class Sums>
  MOIETY_STEP void push(Team& team, const Control& c, const Sums& sums) const {
    int64_t most = 0;
    for (int r = 0; r < c.ranks; ++r) {
      const int64_t n = r == c.rank ? 0 : plan.rows(r, c.rank);
      most = n > most ? n : most;
    }
    const int64_t tasks = c.chunks(most) * (c.ranks - 1), pieces = a.pieces();
    const int64_t own_rows = ahead ? plan.rows(c.rank, c.rank) : 0, own_tasks = c.chunks(own_rows);
    const auto rows_of = [&](int64_t chunk, int64_t n) {
      const int64_t left = n - chunk * c.chunk_rows;
      return left < 0 ? 0 : left < c.chunk_rows ? left : c.chunk_rows;
    };
    for (int64_t i = team.block(); i < tasks || i < own_tasks; i += team.blocks()) {
      const ChunkTask task = chunk_task(i, c.rank, c.ranks);
      const int home = task.peer;
      const int64_t sent = i < tasks ? rows_of(task.chunk, plan.rows(home, c.rank)) * pieces : 0;
      const int64_t kept = rows_of(i, own_rows) * pieces;
      std::byte* const records = a.by_token ? nullptr : c.record(home, c.rank, 0, a.record);
      // A warp has pieces for peers and own ones in turn.
      const int64_t warps = team.warps(), turns = ceil_div(sent < kept ? kept : sent, warps);
      team.each_warp((kept > 0 ? 2 : 1) * turns * warps, [&](auto& warp, int64_t at) {
        const Split turn(at, warps);
        const bool own = kept > 0 && turn.item % 2 == 1;
        const int64_t number = (kept > 0 ? turn.item / 2 : turn.item) * warps + turn.rest;
        if (number >= (own ? kept : sent)) return;
        const Split split(number, pieces);
        const int64_t j = (own ? i : task.chunk) * c.chunk_rows + split.item, piece = split.rest;
        const int32_t* slot_K = plan.slots(own ? c.rank : home, j);
        if (a.by_token) return send_pairs(warp, c, sums, home, j, slot_K, piece);
        std::byte* const record = records + j * a.record;
        PartPlace place{record, a.wire_fp32, sums.whole()};
        if (own) place = {a.out + plan.token(c.rank, j) * a.out_stride, a.out_fp32, sums.wide()};
        const bool live = send_partial(warp, sums, place, slot_K, piece);
        if (live && !own && a.has_side && piece == 0) send_side(warp, record, slot_K);
      });
      if (sent == 0) continue;
      team.sync();
      team.one([&] { store_release(c.ready_word(home, c.rank, task.chunk), c.entry.word); });
    }
  }

  // False if the row has no live pair.
  template <class Warp, class Sums>
  MOIETY_STEP bool send_partial(Warp& warp, const Sums& sums, const PartPlace& place,
                                const int32_t* slot_K, int64_t piece) const {
    const auto live = warp.live(plan.topk, [&](int64_t k) { return slot_K[k]; });
    if (live.count() == 0) return false;
    const bool copy = !a.weighted && live.count() == 1;  // so NaN keep their bits
    sums.for_octets(warp, piece, [&](int64_t c) {
      if (copy) {
        const int64_t slot = live.first();
        if (c >= a.model) return;
        return put(place, c, sums.own(slot, c));
      }
      const int64_t at[1] = {c};
      EightSum sum[1];
      sums.partials(live, at, sum);
      if (c >= a.model) return;
      if (a.wire_fp32) {
        store_eight(place.to, c, a.model, place.whole, sum[0].template round<float>());
      } else {
        put(place, c, sum[0].template round<T>());
      }
    });
    return true;
  }
  MOIETY_STEP void put(const PartPlace& place, int64_t at, const Held<T>& x) const {
    if (place.fp32) {
      store_eight(place.to, at, a.model, place.whole, widened(x));
    } else {
      store_eight(place.to, at, a.model, place.whole, x);
    }
  }
  template <class Warp>
  MOIETY_STEP void send_side(Warp& warp, std::byte* record, const int32_t* slot_K) const {
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
    int64_t number = 0;
    for (int k = 0; k < plan.topk; ++k) {
      const int64_t slot = slot_K[k];
      if (slot < 0) continue;
      std::byte* record = c.pair_record(home, c.rank, {pair + k, j, number++, plan.topk}, a.record);
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

}  // namespace moiety::moe::peers
