#include "moiety/moe/peers/plan_view.h"

#include "moiety/moe/exchange.h"

namespace moiety::moe::peers {

PlanView view_of(const EpPlan& p) {
  const auto ints = [](const TensorView& x) { return x.data<int32_t>(); };
  const auto words = [](const TensorView& x) { return x.data<int64_t>(); };
  return {.tokens = p.tokens,
          .tokens_max = p.tokens_max,
          .rows_max = p.rows_max,
          .capacity = p.capacity,
          .alignment = p.alignment,
          .blocks = ceil_div(p.tokens, kTokenBlock),
          .topk = p.topk,
          .rank = p.rank,
          .ranks = static_cast<int32_t>(p.rows_RR.size(0)),
          .info = words(p.info),
          .rows_real = words(p.rows_real),
          .rows_padded = words(p.rows_padded),
          .rows_before = words(p.rows_before),
          .offset = words(p.offset),
          .slot_TK = ints(p.slot_TK),
          .owner_TK = ints(p.owner_TK),
          .row_TR = ints(p.row_TR),
          .recv_token = ints(p.recv_token),
          .recv_slot = ints(p.recv_slot),
          .slot_row = ints(p.slot_row),
          .count_RE = ints(p.count_RE),
          .rows_RR = ints(p.rows_RR),
          .tokens_R = ints(p.tokens_R),
          .row_end_BR = ints(p.row_end_BR),
          .pair_end_BE = ints(p.pair_end_BE)};
}

}  // namespace moiety::moe::peers
