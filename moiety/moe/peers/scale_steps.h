// The scaled rows of combine_backward among GPU ranks.
#pragma once

#include "moiety/moe/peers/copy_steps.h"
#include "moiety/moe/peers/octets.h"

namespace moiety::moe::peers {

// gy[slot] := round(w g), and the dot products with y; behind PushRows of g.
template <class T>
struct ScaleRows {
  static constexpr int kThreads = 256, kResident = 3;
  Control* control;
  PlanView plan;
  CopyRows rows;                // g, and gy with its padding
  const std::byte *slot_w, *y;  // y may be gy
  int64_t w_stride, y_stride, model;
  bool wide, dots;
  Taken taken;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    if (wide && model % kEight == 0) {
      take<true>(team, c);
    } else {
      take<false>(team, c);
    }
    if (taken.own) zero_empty(team, plan, rows, 0);
  }

 private:
  // `vectors`: all rows are whole octets.
  template <bool vectors, class Team>
  MOIETY_STEP void take(Team& team, const Control& c) const {
    const Arrived came = arrived(c, rows);
    for_received(team, plan, taken, plan.topk, [&](auto& warp, int s, int64_t j, int64_t k) {
      take<vectors>(warp, came, s, j, k);
    });
  }
  // A warp has a pair; the other pairs of a row find g in the cache.
  template <bool vectors, class Warp>
  MOIETY_STEP void take(Warp& warp, const Arrived& came, int s, int64_t j, int64_t k) const {
    const RowPart& p = rows.part[0];
    const int64_t slot = plan.slots(s, j)[k];
    if (slot < 0) return;
    const bool own = s == came.rank;
    const std::byte* g =
        own ? p.from + plan.token(s, j) * p.from_stride : came.record(s, j, rows.staged.record);
    scale<vectors>(warp, g, own ? wide : model % kEight == 0, slot);
  }

  template <bool vectors, class Warp>
  MOIETY_STEP void scale(Warp& warp, const std::byte* g, bool g_wide, int64_t slot) const {
    constexpr int kBatch = vectors ? 3 : 1;  // octets of a lane that wait for memory together
    const RowPart& p = rows.part[0];
    std::byte* to = p.to + slot * p.to_stride;
    const float w = load<float>(slot_w + slot * w_stride);
    warp.fold(
        [&](int lane) {
          float dot = 0;
          for (int64_t first = lane * kEight; first < model; first += kBatch * 32 * kEight) {
            Held<T> x[kBatch], held[kBatch];
            MOIETY_UNROLL
            for (int i = 0; i < kBatch; ++i) {
              const int64_t at = first + i * 32 * kEight;
              if (at >= model) continue;
              x[i] = load_eight<T>(g, at, model, vectors || g_wide);
              if (dots) held[i] = load_eight<T>(y + slot * y_stride, at, model, vectors || wide);
            }
            MOIETY_UNROLL
            for (int i = 0; i < kBatch; ++i) {
              const int64_t at = first + i * 32 * kEight;
              if (at < model) dot = scaled<vectors>(to, at, w, x[i], held[i], dot);
            }
          }
          return dot;
        },
        [&](float dot) {
          if (dots) store(rows.values + slot * rows.value_stride, dot);
        });
  }
  // Stores an octet; the dot product goes on.
  template <bool vectors>
  MOIETY_STEP float scaled(std::byte* to, int64_t at, float w, const Held<T>& x,
                           const Held<T>& held, float dot) const {
    if (dots) {
      // An element that does not exist must not turn a sum of -0 into +0.
      MOIETY_UNROLL
      for (int i = 0; i < kEight; ++i) {
        if (vectors || at + i < model) dot = fmaf(element(held, i), element(x, i), dot);
      }
    }
    EightSum sum;
    sum.add_weighted(w, x);
    store_eight(to, at, model, vectors || wide, sum.template round<T>());
    return dot;
  }
};

}  // namespace moiety::moe::peers
