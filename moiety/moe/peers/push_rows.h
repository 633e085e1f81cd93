// What a rank on a GPU stores at peers on the way to experts: rows, by chunks.
#pragma once

#include "moiety/moe/peers/copy_rows.h"

namespace moiety::moe::peers {

// Where a row goes: its data, and its record.
struct RowTarget {
  std::byte *data, *record;
  const RecordPlaces* places;
};
// Stores a piece of row t, whose data is `data`.
template <class Warp>
MOIETY_STEP void store_piece(Warp& warp, const PlanView& plan, const CopyRows& rows,
                             const RowPart& data, int64_t t, int64_t piece, const RowTarget& to) {
  move_piece(warp, data, data.from + t * data.from_stride, piece,
             [&](auto&& store) { store(to.data); });
  if (piece > 0) return;
  for (int i = 1; i < rows.parts; ++i) {
    const RowPart& p = rows.part[i];
    copy_bytes(warp, to.record + to.places->at[i], p.from + t * p.from_stride, p.bytes, p.unit);
  }
  if (!rows.weighted) return;
  warp.each(plan.topk, [&](int64_t k) {
    store(to.record + to.places->side_at + 4 * k,
          load<uint32_t>(rows.weights + t * rows.weight_stride + 4 * k));
  });
}

// Stores the rows that peers need, chunk by chunk, and announces each chunk when it is stored.
struct PushRows {
  static constexpr int kThreads = 256;
  // Chunks whose rows a team looks up together.
  static constexpr int kChunks = 4;
  // A team's memory for the rows of chunks: their tokens, and the slots that direct rows go to.
  static constexpr int64_t shared_bytes(int64_t chunk_rows) { return 8 * chunk_rows * kChunks; }
  Control* control;
  PlanView plan;
  CopyRows rows;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    int64_t most = 0;
    for (int r = 0; r < c.ranks; ++r) {
      const int64_t n = r == c.rank ? 0 : plan.rows(c.rank, r);
      most = n > most ? n : most;
    }
    const int64_t tasks = c.chunks(most) * (c.ranks - 1), step = team.blocks();
    for (int64_t first = team.block(); first < tasks; first += kChunks * step) {
      const int64_t left = ceil_div(tasks - first, step), n = left < kChunks ? left : kChunks;
      find_tokens(team, c, first, n);
      find_slots(team, c, first, n);
      for (int64_t i = 0; i < n; ++i) {
        push(team, c, chunk_task(first + i * step, c.rank, c.ranks), i * c.chunk_rows);
      }
    }
  }

 private:
  // The rows of a chunk.
  MOIETY_STEP int64_t count_of(const Control& c, const ChunkTask& task) const {
    const int64_t left = plan.rows(c.rank, task.peer) - task.chunk * c.chunk_rows;
    return left < 0 ? 0 : left < c.chunk_rows ? left : c.chunk_rows;
  }
  template <class Team>
  MOIETY_STEP static int32_t* tokens_of(Team& team) {
    return team.template shared<int32_t>(0);
  }
  template <class Team>
  MOIETY_STEP static int32_t* slots_of(Team& team, const Control& c) {
    return team.template shared<int32_t>(4 * c.chunk_rows * kChunks);
  }

  // Finds the tokens of the rows of `n` of this team's chunks, each by a warp: -1 for dead rows.
  template <class Team>
  MOIETY_STEP void find_tokens(Team& team, const Control& c, int64_t first, int64_t n) const {
    team.sync();
    team.each_warp(n, [&](auto& warp, int64_t i) {
      const ChunkTask task = chunk_task(first + i * team.blocks(), c.rank, c.ranks);
      const int r = task.peer;
      const int64_t begin = task.chunk * c.chunk_rows, count = count_of(c, task);
      if (count == 0) return;
      int32_t* const token_of = tokens_of(team) + i * c.chunk_rows;
      warp.each(count, [&](int64_t j) { token_of[j] = -1; });
      warp.sync();
      int64_t b = warp.sum(plan.blocks, [&](int64_t k) { return plan.row_end(k, r) <= begin; });
      for (; b < plan.blocks; ++b) {
        find_in_block(warp, c, r, b * kTokenBlock, [&](int64_t row, int64_t token) {
          const int64_t at = row - begin;
          if (at >= 0 && at < count) token_of[at] = static_cast<int32_t>(token);
        });
        if (plan.row_end(b, r) >= begin + count) break;
      }
    });
    team.sync();
  }
  // Calls use(row for rank r, token) for the tokens of the block that begins with `first`; dead rows
  // are negative.
  template <class Warp, class Use>
  MOIETY_STEP void find_in_block(Warp& warp, const Control& c, int r, int64_t first,
                                 Use&& use) const {
    constexpr int kTogether = kTokenBlock / 32;  // of a lane, that wait for memory together
    warp.lanes([&](int lane) {
      int32_t row[kTogether];
      MOIETY_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        const int64_t t = first + 32 * i + lane;
        row[i] = t < plan.tokens ? plan.row_TR[t * c.ranks + r] : -1;
      }
      MOIETY_UNROLL
      for (int i = 0; i < kTogether; ++i) use(row[i], first + 32 * i + lane);
    });
  }
  // Finds the slots of those rows that go where they stay.
  template <class Team>
  MOIETY_STEP void find_slots(Team& team, const Control& c, int64_t first, int64_t n) const {
    bool any = false;
    for (int64_t i = 0; i < n; ++i) {
      const ChunkTask task = chunk_task(first + i * team.blocks(), c.rank, c.ranks);
      if (!c.direct_R[task.peer]) continue;
      any = true;
      const int64_t at = i * c.chunk_rows;
      team.each_warp(count_of(c, task), [&](auto& warp, int64_t j) {
        const int32_t token = tokens_of(team)[at + j];
        if (token < 0) return;
        const int32_t slot = primary_slot(warp, token, task.peer);
        warp.one([&] { slots_of(team, c)[at + j] = slot; });
      });
    }
    if (any) team.sync();
  }
  // `at`: the place of its rows in the team's memory.
  template <class Team>
  MOIETY_STEP void push(Team& team, const Control& c, const ChunkTask& task, int64_t at) const {
    const int64_t count = count_of(c, task);
    if (count == 0) return;
    const int r = task.peer;
    const int32_t *const token_of = tokens_of(team) + at, *const slot_of = slots_of(team, c) + at;
    const Direct direct = c.direct_R[r];
    const RowPart data = rows.data_for(direct);
    const RecordPlaces& places = direct ? rows.direct : rows.staged;
    const int64_t pieces = CopyRows::pieces(data), stride = places.record;
    std::byte* const records = c.record(r, c.rank, task.chunk * c.chunk_rows, stride);
    team.each_warp(count * pieces, [&](auto& warp, int64_t i) {
      const Split split(i, pieces);
      const int64_t t = token_of[split.item];
      if (t < 0) return;
      std::byte* const record = records + split.item * stride;
      store_piece(warp, plan, rows, data, t, split.rest,
                  {direct ? direct.row(slot_of[split.item]) : record, record, &places});
    });
    team.sync();
    // The others go on with the next chunk.
    team.one([&] { store_release(c.ready_word(r, c.rank, task.chunk), c.entry.word); });
  }
  // The slot of the first live pair of token t at rank r.
  template <class Warp>
  MOIETY_STEP int32_t primary_slot(Warp& warp, int64_t t, int r) const {
    const int32_t *slot_K = plan.slot_TK + t * plan.topk, *owner_K = plan.owner_TK + t * plan.topk;
    const auto live =
        warp.live(plan.topk, [&](int64_t k) { return owner_K[k] == r ? slot_K[k] : int32_t{-1}; });
    return static_cast<int32_t>(live.first());
  }
};

}  // namespace moiety::moe::peers
