// Parts that the movers of rows on a CPU share: a plan's maps, and loops over chunks of its rows.
#pragma once

#include <algorithm>
#include <vector>

#include "moiety/base/parallel.h"
#include "moiety/moe/exchange.h"

namespace moiety::moe {

inline constexpr int64_t kTaskBytes = 64 << 10;  // about what a task of a loop moves

inline int64_t rows_per_task(int64_t row_bytes) {
  return std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(row_bytes, 64));
}

// The maps of a plan, as the movers read them.
struct PlanMaps {
  explicit PlanMaps(const EpPlan& plan)
      : topk(plan.topk),
        tokens_max(plan.tokens_max),
        ranks(static_cast<int>(plan.rows_RR.size(0))),
        slot_TK(plan.slot_TK.data<int32_t>()),
        owner_TK(plan.owner_TK.data<int32_t>()),
        row_TR(plan.row_TR.data<int32_t>()),
        recv_token(plan.recv_token.data<int32_t>()),
        recv_slot(plan.recv_slot.data<int32_t>()),
        rows_RR(plan.rows_RR.data<int32_t>()),
        row_end_BR(plan.row_end_BR.data<int32_t>()) {}

  const int32_t* slots(int s, int64_t j) const { return recv_slot + (s * tokens_max + j) * topk; }
  int32_t token(int s, int64_t j) const { return recv_token[s * tokens_max + j]; }
  int64_t rows(int from, int to) const { return rows_RR[from * ranks + to]; }
  std::vector<int64_t> sent_by(int rank) const {
    return {rows_RR + rank * ranks, rows_RR + (rank + 1) * ranks};
  }
  std::vector<int64_t> sent_to(int rank) const {
    std::vector<int64_t> out(ranks);
    for (int s = 0; s < ranks; ++s) out[s] = rows(s, rank);
    return out;
  }
  bool alive(const int32_t* slot_K) const {
    return std::any_of(slot_K, slot_K + topk, [](int32_t slot) { return slot >= 0; });
  }
  int count_alive(const int32_t* slot_K) const {
    return static_cast<int>(
        std::count_if(slot_K, slot_K + topk, [](int32_t slot) { return slot >= 0; }));
  }

  int topk;
  int64_t tokens_max;
  int ranks;
  const int32_t *slot_TK, *owner_TK, *row_TR, *recv_token, *recv_slot, *rows_RR, *row_end_BR;
};

// Calls body(peer, chunk, first row, end row) for all chunks of n(peer) rows, peers interleaved.
template <class Rows, class Body>
void for_chunks(const Exchange& exchange, const Rows& n, const Body& body) {
  const int peers = exchange.ranks() - 1;
  int64_t most = 0;
  for (int i = 0; i < peers; ++i) most = std::max<int64_t>(most, n(exchange.peer(i)));
  parallel_tasks(exchange.chunks(most) * peers, [&](int64_t task) {
    const int r = exchange.peer(static_cast<int>(task % peers));
    const int64_t chunk = task / peers, begin = chunk * exchange.chunk_rows();
    if (begin >= n(r) || exchange.failed()) return;
    body(r, chunk, begin, std::min<int64_t>(begin + exchange.chunk_rows(), n(r)));
  });
}

}  // namespace moiety::moe
