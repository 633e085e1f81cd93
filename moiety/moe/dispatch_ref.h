// The reference of dispatch, and of the gradients of the weights in dispatch_backward (the rows of
// dispatch_backward are those of combine without weights, docs/spec/ep.md#rows-and-sums). In the
// templates T is storage, Acc arithmetic; with T = Acc = double they serve gradient checks.
#pragma once

#include <cstdint>
#include <vector>

#include "moiety/moe/prepare_ref.h"

namespace moiety::moe::ref {

template <class T>
void zero_rows(std::vector<T>& x, int64_t model, int64_t begin, int64_t end) {
  for (int64_t i = begin * model; i < end * model; ++i) x[i] = T(0.0f);
}

// Zeroes the padding rows of every expert and, if asked, the tail.
template <class T>
void zero_padding(const Plan::Rank& rank, int64_t model, bool tail, std::vector<T>& x) {
  for (size_t e = 0; e < rank.real.size(); ++e) {
    zero_rows(x, model, rank.offset[e] + rank.real[e], rank.offset[e + 1]);
  }
  if (tail) zero_rows(x, model, rank.offset.back(), static_cast<int64_t>(x.size()) / model);
}

// visit(s, t, k, r, slot) for every live pair: choice k of token t of rank s, which has this slot
// of rank r.
template <class Visit>
void for_live_pairs(const Plan& plan, Visit&& visit) {
  for (int s = 0; s < static_cast<int>(plan.rank.size()); ++s) {
    for (int64_t t = 0; t < plan.in.tokens(s); ++t) {
      for (int k = 0; k < plan.in.topk; ++k) {
        const int32_t slot = plan.slots(s, t)[k];
        if (slot >= 0) visit(s, t, k, plan.owner(s, t, k), slot);
      }
    }
  }
}

// `rows` and `slot_w` come with their old contents.
template <class T, class Acc>
void dispatch(const Plan& plan, int64_t model, const PerRank<T>& x, const PerRank<Acc>* w,
              bool zero_tail, PerRank<T>& rows, PerRank<Acc>& slot_w) {
  for (size_t r = 0; r < plan.rank.size(); ++r) {
    zero_padding(plan.rank[r], model, zero_tail, rows[r]);
    if (w) zero_padding(plan.rank[r], 1, zero_tail, slot_w[r]);
  }
  for_live_pairs(plan, [&](int s, int64_t t, int k, int r, int32_t slot) {
    for (int64_t d = 0; d < model; ++d) rows[r][slot * model + d] = x[s][t * model + d];
    if (w) slot_w[r][slot] = (*w)[s][t * plan.in.topk + k];
  });
}

// Rows in a low-precision format (docs/spec/ep.md#payloads): the bytes of each part, with compact
// scales.
struct QuantizedRows {
  PerRank<uint8_t> data, scales, row_scale;
};
struct QuantizedBytes {
  int64_t data = 0, scales = 0, row_scale = 0;  // bytes of a row
};
void dispatch(const Plan& plan, const QuantizedBytes& bytes, const QuantizedRows& x,
              const PerRank<float>* w, bool zero_tail, QuantizedRows& rows, PerRank<float>& slot_w);

// The scales of a rank's `capacity` rows in a layout of GEMMs, made from compact ones, `cols` per
// row: bytes, or floats by column. Bytes that stay as they were are taken from `before`.
std::vector<uint8_t> swizzled_scales(const Plan::Rank& rank, int64_t capacity, int64_t cols,
                                     bool zero_tail, const std::vector<uint8_t>& compact,
                                     uint8_t before);
std::vector<uint8_t> column_major_scales(const Plan::Rank& rank, int64_t capacity, int64_t cols,
                                         bool zero_tail, const std::vector<uint8_t>& compact,
                                         uint8_t before);

// gw[t, k] of dispatch_backward.
template <class Acc>
PerRank<Acc> weight_gradients(const Plan& plan, const PerRank<Acc>& g_slot_w) {
  PerRank<Acc> out(plan.rank.size());
  for (int s = 0; s < static_cast<int>(out.size()); ++s) {
    out[s].assign(plan.in.tokens(s) * plan.in.topk, Acc(0));
  }
  for_live_pairs(plan, [&](int s, int64_t t, int k, int r, int32_t slot) {
    out[s][t * plan.in.topk + k] = g_slot_w[r][slot];
  });
  return out;
}

}  // namespace moiety::moe::ref
