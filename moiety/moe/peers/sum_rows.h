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
          a.weighted ? sum[q].add_weighted(w[i], held[i][q]) : sum[q].add(held[i][q]);
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
      std::byte* const records = a.by_token ? nullptr : c.record(home, c.rank, 0, a.record);
      team.each_warp((end - begin) * pieces, [&](auto& warp, int64_t at) {
        const Split split(at, pieces);
        const int64_t j = begin + split.item, piece = split.rest;
        const int32_t* slot_K = plan.slots(home, j);
        if (a.by_token) {
          send_pairs(warp, c, sums, home, j, slot_K, piece);
        } else {
          send_partial(warp, sums, records + j * a.record, slot_K, piece);
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
    const bool copy = !a.weighted && live.count() == 1;  // so NaN keep their bits
    sums.for_octets(warp, piece, [&](int64_t c) {
      if (copy) {
        const int64_t slot = live.first();
        if (c >= a.model) return;
        const Held<T> own = sums.own(slot, c);
        if (a.wire_fp32) return store_eight(record, c, a.model, sums.whole(), widened(own));
        return store_eight(record, c, a.model, sums.whole(), own);
      }
      const int64_t at[1] = {c};
      EightSum sum[1];
      sums.partials(live, at, sum);
      if (c >= a.model) return;
      if (a.wire_fp32) {
        store_eight(record, c, a.model, sums.whole(), sum[0].template round<float>());
      } else {
        store_eight(record, c, a.model, sums.whole(), sum[0].template round<T>());
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

}  // namespace moiety::moe::peers
