// The reference of combine and combine_backward (docs/spec/ep.md#rows-and-sums), as templates: T is
// storage, Acc arithmetic; with T = Acc = double they serve gradient checks.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "moiety/moe/combine.h"
#include "moiety/moe/dispatch_ref.h"

namespace moiety::moe::ref {

// `addend` is given in Acc, since its conversion is exact.
template <class T, class Acc, class Out>
PerRank<Out> combine(const Plan& plan, int64_t model, const PerRank<T>& y,
                     const PerRank<Acc>* slot_w, const PerRank<Acc>* addend, Reduction reduction) {
  const int ranks = static_cast<int>(plan.rank.size());
  PerRank<Out> out(ranks);
  for (int s = 0; s < ranks; ++s) {
    out[s].resize(plan.in.tokens(s) * model);
    for (int64_t i = 0; i < static_cast<int64_t>(out[s].size()); ++i) {
      const int64_t t = i / model, d = i % model;
      const int32_t* slot_K = plan.slots(s, t);
      int alive = 0;
      T last{};
      bool started = false;
      Acc acc{};
      const auto add = [&](Acc v) {
        acc = started ? acc + v : v;
        started = true;
      };
      // Adds the pairs that `owner` has (-1: all pairs) to v, in order.
      const auto recurrence = [&](int owner, Acc& v) {
        bool any = false;
        for (int k = 0; k < plan.in.topk; ++k) {
          if (slot_K[k] < 0) continue;
          const int r = plan.owner(s, t, k);
          if (owner >= 0 && owner != r) continue;
          const T value = y[r][slot_K[k] * model + d];
          const Acc f = static_cast<Acc>(value);
          if (slot_w) {
            const Acc w = (*slot_w)[r][slot_K[k]];
            v = any ? std::fma(w, f, v) : w * f;
          } else {
            v = any ? v + f : f;
          }
          any = true;
          ++alive;
          last = value;
        }
        return any;
      };
      if (reduction == Reduction::kToken) {
        started = recurrence(-1, acc);
      } else {
        for (int r = 0; r < ranks; ++r) {
          Acc v{};
          if (!recurrence(r, v)) continue;
          add(reduction == Reduction::kRank ? static_cast<Acc>(T(v)) : v);
        }
      }
      if (addend) add((*addend)[s][i]);
      out[s][i] = started ? Out(acc) : Out(0.0f);
      if constexpr (std::is_same_v<T, Out>) {
        if (alive == 1 && !slot_w && !addend) out[s][i] = last;
      }
    }
  }
  return out;
}

template <class T, class Acc>
Acc dot(const T* a, const T* b, int64_t n) {
  Acc lane[32] = {};
  for (int64_t i = 0; i < n; ++i) {
    Acc& v = lane[i / 8 % 32];
    v = std::fma(static_cast<Acc>(a[i]), static_cast<Acc>(b[i]), v);
  }
  for (int o = 16; o > 0; o /= 2) {
    for (int l = 0; l < o; ++l) lane[l] += lane[l + o];
  }
  return lane[0];
}

template <class T, class Acc>
void combine_backward(const Plan& plan, int64_t model, const PerRank<T>& g,
                      const PerRank<Acc>* slot_w, const PerRank<T>* y, PerRank<T>& gy,
                      PerRank<Acc>& g_slot_w) {
  for (size_t r = 0; r < plan.rank.size(); ++r) {
    zero_padding(plan.rank[r], model, false, gy[r]);
    if (y) zero_padding(plan.rank[r], 1, false, g_slot_w[r]);
  }
  for_live_pairs(plan, [&](int s, int64_t t, int, int r, int32_t slot) {
    const T* from = &g[s][t * model];
    if (y) g_slot_w[r][slot] = dot<T, Acc>(&(*y)[r][slot * model], from, model);
    for (int64_t d = 0; d < model; ++d) {
      gy[r][slot * model + d] =
          slot_w ? T((*slot_w)[r][slot] * static_cast<Acc>(from[d])) : from[d];
    }
  });
}

}  // namespace moiety::moe::ref
