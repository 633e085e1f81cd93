// The oracle of expert parallelism: takes the inputs of all ranks and returns the outputs of all,
// in plain loops over pairs (docs/spec/ep.md#rows-and-sums). Shares no code with the library but
// the expert map and the formats. The data operations are templates: T storage, Acc arithmetic;
// with T = Acc = double they serve the gradient checks.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "moiety/moe/combine.h"
#include "moiety/moe/expert_map.h"
#include "moiety/moe/prepare.h"

namespace moiety::moe::ref {

template <class T>
using PerRank = std::vector<std::vector<T>>;

struct PlanInput {
  ExpertMap map{1, 1};
  int topk = 1;
  int64_t alignment = 1;
  std::vector<int64_t> capacity;  // in force, by rank
  PerRank<int64_t> idx;           // [T_s, K]
  int64_t peer_rows = 0;          // P; 0: all
  int64_t tokens(int s) const { return static_cast<int64_t>(idx[s].size()) / topk; }
};

struct Plan {
  struct Rank {
    std::vector<int64_t> real, padded, before, offset;
    std::array<int64_t, 16> info{};
    std::vector<int32_t> slot_TK, row_TR;
    // By source rank: the tokens whose rows come here, and their slots here.
    PerRank<int32_t> token;                         // [n]
    PerRank<int32_t> slot_K;                        // [n, K]
    std::vector<std::pair<int, int64_t>> slot_row;  // [C] (s, j), s = -1 where there is none
  };
  PlanInput in;
  std::vector<Rank> rank;

  // The slots of a token, by k; -1 where not alive.
  const int32_t* slots(int s, int64_t t) const { return &rank[s].slot_TK[t * in.topk]; }
  int owner(int s, int64_t t, int k) const {
    return in.map.owner(static_cast<int>(in.idx[s][t * in.topk + k]));
  }
};

// slot_row has rows[r] entries at rank r; without `rows` it is left out.
Plan make_plan(const PlanInput& in, const std::vector<int64_t>& rows = {});

// rows and slot_w come filled with what was there before.
template <class T, class Acc>
void dispatch(const Plan& plan, int64_t model, const PerRank<T>& x, const PerRank<Acc>* w,
              bool zero_tail, PerRank<T>& rows, PerRank<Acc>& slot_w);

// Rows in a low-precision format (docs/spec/ep.md#payloads): the bytes of each part, scales
// compact.
struct QuantizedRows {
  PerRank<uint8_t> data, scales, row_scale;
};
struct QuantizedBytes {
  int64_t data = 0, scales = 0, row_scale = 0;  // of a row
};
void dispatch(const Plan& plan, const QuantizedBytes& bytes, const QuantizedRows& x,
              const PerRank<float>* w, bool zero_tail, QuantizedRows& rows, PerRank<float>& slot_w);

// The scales of a rank's `capacity` rows in a layout of GEMMs, from compact ones, `cols` a
// row: bytes, or floats by column. Bytes that stay as they were are `before`.
std::vector<uint8_t> swizzled_scales(const Plan::Rank& rank, int64_t capacity, int64_t cols,
                                     bool zero_tail, const std::vector<uint8_t>& compact,
                                     uint8_t before);
std::vector<uint8_t> column_major_scales(const Plan::Rank& rank, int64_t capacity, int64_t cols,
                                         bool zero_tail, const std::vector<uint8_t>& compact,
                                         uint8_t before);

// `addend` is given in Acc: its conversion is exact.
template <class T, class Acc, class Out>
PerRank<Out> combine(const Plan& plan, int64_t model, const PerRank<T>& y,
                     const PerRank<Acc>* slot_w, const PerRank<Acc>* addend, Reduction reduction);

template <class T, class Acc>
void combine_backward(const Plan& plan, int64_t model, const PerRank<T>& g,
                      const PerRank<Acc>* slot_w, const PerRank<T>* y, PerRank<T>& gy,
                      PerRank<Acc>& g_slot_w);

// gw[t, k] of dispatch_backward; its gx is combine without weights.
template <class Acc>
PerRank<Acc> weight_gradients(const Plan& plan, const PerRank<Acc>& g_slot_w);

// -- Definitions of the templates -----------------------------------------------------------------

template <class T>
void zero_rows(std::vector<T>& x, int64_t model, int64_t begin, int64_t end) {
  for (int64_t i = begin * model; i < end * model; ++i) x[i] = T(0.0f);
}

// Padding rows of every expert and, if asked, the tail.
template <class T>
void zero_padding(const Plan::Rank& rank, int64_t model, bool tail, std::vector<T>& x) {
  for (size_t e = 0; e < rank.real.size(); ++e) {
    zero_rows(x, model, rank.offset[e] + rank.real[e], rank.offset[e + 1]);
  }
  if (tail) zero_rows(x, model, rank.offset.back(), static_cast<int64_t>(x.size()) / model);
}

template <class T, class Acc>
void dispatch(const Plan& plan, int64_t model, const PerRank<T>& x, const PerRank<Acc>* w,
              bool zero_tail, PerRank<T>& rows, PerRank<Acc>& slot_w) {
  for (size_t r = 0; r < plan.rank.size(); ++r) {
    zero_padding(plan.rank[r], model, zero_tail, rows[r]);
    if (w) zero_padding(plan.rank[r], 1, zero_tail, slot_w[r]);
  }
  for (int s = 0; s < static_cast<int>(plan.rank.size()); ++s) {
    for (int64_t t = 0; t < plan.in.tokens(s); ++t) {
      for (int k = 0; k < plan.in.topk; ++k) {
        const int32_t slot = plan.slots(s, t)[k];
        if (slot < 0) continue;
        const int r = plan.owner(s, t, k);
        for (int64_t d = 0; d < model; ++d) rows[r][slot * model + d] = x[s][t * model + d];
        if (w) slot_w[r][slot] = (*w)[s][t * plan.in.topk + k];
      }
    }
  }
}

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
      // The recurrence over the pairs that `owner` has (-1: all), into v.
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
  for (int s = 0; s < static_cast<int>(plan.rank.size()); ++s) {
    for (int64_t t = 0; t < plan.in.tokens(s); ++t) {
      for (int k = 0; k < plan.in.topk; ++k) {
        const int32_t slot = plan.slots(s, t)[k];
        if (slot < 0) continue;
        const int r = plan.owner(s, t, k);
        const T* from = &g[s][t * model];
        if (y) g_slot_w[r][slot] = dot<T, Acc>(&(*y)[r][slot * model], from, model);
        for (int64_t d = 0; d < model; ++d) {
          gy[r][slot * model + d] =
              slot_w ? T((*slot_w)[r][slot] * static_cast<Acc>(from[d])) : from[d];
        }
      }
    }
  }
}

template <class Acc>
PerRank<Acc> weight_gradients(const Plan& plan, const PerRank<Acc>& g_slot_w) {
  PerRank<Acc> out(plan.rank.size());
  for (int s = 0; s < static_cast<int>(plan.rank.size()); ++s) {
    const int64_t pairs = plan.in.tokens(s) * plan.in.topk;
    out[s].assign(pairs, Acc(0));
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t t = i / plan.in.topk;
      const int k = static_cast<int>(i % plan.in.topk);
      const int32_t slot = plan.slots(s, t)[k];
      if (slot >= 0) out[s][i] = g_slot_w[plan.owner(s, t, k)][slot];
    }
  }
  return out;
}

}  // namespace moiety::moe::ref
