// Rows to experts on a CPU: dispatch and, where it only copies, combine_backward. Every row is
// copied twice on its way (into a record, out of it), once more by collectives, and own rows once.
//
// A rank whose rows are direct (EpGroup::attach) gets the data of a row in the slot of its first
// live pair there, the primary slot, and a record of the rest; it copies the data to the row's
// other slots.
#include <algorithm>
#include <cstring>

#include "moiety/moe/plan_maps.h"
#include "moiety/moe/row_movers.h"

namespace moiety::moe {
namespace {

// Calls send(token, row) for those tokens of this rank, among its rows [begin, end) at r, that have
// a live pair.
template <class Send>
void for_tokens(const PlanMaps& maps, int64_t tokens, int r, int64_t begin, int64_t end,
                Send&& send) {
  const auto row_end = [&](int64_t block) { return maps.row_end_BR[block * maps.ranks + r]; };
  const int64_t blocks = ceil_div(tokens, kTokenBlock);
  int64_t first = 0;  // block that ends behind `begin`
  for (int64_t count = blocks; count > 0;) {
    const int64_t half = count / 2;
    const bool before = row_end(first + half) <= begin;
    first += before ? half + 1 : 0;
    count = before ? count - half - 1 : half;
  }
  for (int64_t t = first * kTokenBlock; t < tokens; ++t) {
    const int32_t row = maps.row_TR[t * maps.ranks + r];
    if (row >= begin && row < end) send(t, row);
    if (row >= end - 1) return;
    if ((t + 1) % kTokenBlock == 0 && row_end(t / kTokenBlock) >= end) return;
  }
}

// The slot of a token's first live pair at rank r, where it has one.
int64_t primary_slot(const PlanMaps& maps, int64_t t, int r) {
  const int64_t first = t * maps.topk;
  int64_t pair = first;
  while (pair + 1 < first + maps.topk && maps.owner_TK[pair] != r) ++pair;
  return maps.slot_TK[pair];
}
int64_t primary_slot(const PlanMaps& maps, const int32_t* slot_K) {
  return *std::find_if(slot_K, slot_K + maps.topk, [](int32_t slot) { return slot >= 0; });
}

// The parts of a record for rank r: beside data that went to their place, the rest.
RowParts parts_for(const Exchange& exchange, const RowParts& parts, int r) {
  return exchange.direct(r) ? RowParts{0, parts.scales, parts.row_scale} : parts;
}

// Sends x.
template <bool quantized>
void push(Exchange& exchange, const EpPlan& plan, const SourceRows& x, const TensorView& w_TK) {
  const PlanMaps maps(plan);
  const Rows w(w_TK);
  const bool weights = w_TK.defined();
  const int me = exchange.rank();
  const RowParts& parts = x.parts;
  const RowParts rest{0, parts.scales, parts.row_scale};
  const bool has_rest = weights || quantized;
  exchange.open(Box::kRows, parts.record(maps.topk), maps.sent_by(me),
                has_rest ? rest.record(maps.topk) : 0);
  const auto sent = [&](int r) { return maps.rows(me, r); };
  for_chunks(exchange, sent, [&](int r, int64_t chunk, int64_t begin, int64_t end) {
    exchange.before_store();
    const RowParts at = parts_for(exchange, parts, r);
    for_tokens(maps, plan.tokens, r, begin, end, [&](int64_t t, int64_t j) {
      std::byte* record = exchange.out(r, j);
      std::memcpy(exchange.direct(r) ? exchange.direct_row(r, primary_slot(maps, t, r)) : record,
                  x.data[t], parts.data);
      if constexpr (quantized) {
        std::memcpy(record + at.scales_at(), x.scales[t], parts.scales);
        if (parts.row_scale) {
          std::memcpy(record + at.row_scale_at(), x.row_scale[t], sizeof(float));
        }
      }
      if (weights) std::memcpy(record + at.side_at(), w[t], maps.topk * sizeof(float));
    });
    exchange.announce(r, chunk);
  });
}

// Calls expand(row, its K slots) for the own rows and those that arrive.
template <bool quantized, class Expand>
void take(Exchange& exchange, const EpPlan& plan, const SourceRows& x, const TensorView& w_TK,
          const Expand& expand) {
  const PlanMaps maps(plan);
  const Rows w(w_TK);
  const bool weights = w_TK.defined();
  const int me = exchange.rank();
  const RowParts& parts = x.parts;
  parallel_for(maps.rows(me, me), rows_per_task(parts.data), [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      const int32_t* slots = maps.slots(me, j);
      if (!maps.alive(slots)) continue;
      const int32_t t = maps.token(me, j);
      Row row{x.data[t], weights ? w.as<float>(t) : nullptr};
      if constexpr (quantized) {
        row.scales = x.scales[t];
        row.row_scale = parts.row_scale ? x.row_scale[t] : nullptr;
      }
      expand(row, slots);
    }
  });

  exchange.transfer(maps.sent_to(me));
  const RowParts at = parts_for(exchange, parts, me);
  const auto received = [&](int s) { return maps.rows(s, me); };
  for_chunks(exchange, received, [&](int s, int64_t, int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      const int32_t* slots = maps.slots(s, j);
      if (!maps.alive(slots)) continue;
      const std::byte* record = exchange.in(s, j);
      Row row{exchange.direct(me) ? exchange.direct_row(me, primary_slot(maps, slots)) : record,
              weights ? reinterpret_cast<const float*>(record + at.side_at()) : nullptr};
      if constexpr (quantized) {
        row.scales = record + at.scales_at();
        row.row_scale = parts.row_scale ? record + at.row_scale_at() : nullptr;
      }
      expand(row, slots);
    }
  });
}

template <bool quantized>
void take_rows_of(Exchange& exchange, const EpPlan& plan, const SourceRows& x,
                  const TensorView& w_TK, const ExpertRows& rows, const quant::AmaxSink& sink) {
  const int64_t* offset = plan.offset.data<int64_t>();
  const auto expert = [&](int32_t slot) {
    return std::upper_bound(offset, offset + plan.offset.size(0), slot) - offset - 1;
  };
  const DType dtype = x.format == PayloadFormat::kBF16 ? DType::kBFloat16 : DType::kFloat32;
  take<quantized>(exchange, plan, x, w_TK, [&](const Row& row, const int32_t* slot_K) {
    const uint32_t amax = sink.defined() ? quant::amax_bits(dtype, row.data, x.model) : 0;
    if (rows.source) {
      const int32_t* slot =
          std::find_if(slot_K, slot_K + plan.topk, [](int32_t s) { return s >= 0; });
      rows.put<quantized>(rows.source[*slot], row);
    }
    for (int k = 0; k < plan.topk; ++k) {
      if (slot_K[k] < 0) continue;
      if (!rows.source) rows.put<quantized>(slot_K[k], row);
      rows.put_value(slot_K[k], row, k);
      if (sink.defined()) sink.raise(expert(slot_K[k]), amax);
    }
  });
}

}  // namespace

void push_rows(Exchange& exchange, const EpPlan& plan, const SourceRows& x,
               const TensorView& w_TK) {
  x.quantized() ? push<true>(exchange, plan, x, w_TK) : push<false>(exchange, plan, x, w_TK);
}

void take_rows(Exchange& exchange, const EpPlan& plan, const SourceRows& x, const TensorView& w_TK,
               const ExpertRows& rows, const quant::AmaxSink& sink) {
  sink.clear();
  x.quantized() ? take_rows_of<true>(exchange, plan, x, w_TK, rows, sink)
                : take_rows_of<false>(exchange, plan, x, w_TK, rows, sink);
}

void copy_rows(Exchange& exchange, const EpPlan& plan, const SourceRows& x, const TensorView& w_TK,
               const ExpertRows& rows, const quant::AmaxSink& sink) {
  push_rows(exchange, plan, x, w_TK);
  take_rows(exchange, plan, x, w_TK, rows, sink);
}

void expand_rows(Exchange& exchange, const EpPlan& plan, const SourceRows& x,
                 const ExpandRow& expand) {
  push<false>(exchange, plan, x, {});
  take<false>(exchange, plan, x, {}, expand);
}

void zero_padding(const EpPlan& plan, const ExpertRows& rows, bool tail) {
  const auto zero = [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      if (!rows.source) rows.zero(slot);
      rows.zero_value(slot);
    }
  };
  const int64_t* offset = plan.offset.data<int64_t>();
  const int64_t experts = plan.rows_real.size(0);
  for (int64_t e = 0; e < experts; ++e) {
    zero(offset[e] + plan.rows_real.data<int64_t>()[e], offset[e + 1]);
  }
  if (tail) zero(offset[experts], plan.capacity);
  if (rows.source) {
    const int32_t last =
        plan.capacity > 0 ? *std::max_element(rows.source, rows.source + plan.capacity) : -1;
    for (int64_t place = last + 1; place < rows.places; ++place) rows.zero(place);
  }
  rows.scales.zero_pads();
}

}  // namespace moiety::moe
