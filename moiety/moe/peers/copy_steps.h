// Rows to experts among GPU ranks: dispatch and, where it only copies, combine_backward. A row goes
// once to each rank that has a live pair of it, into a record there; that rank copies it to its
// slots.
#pragma once

#include "moiety/moe/peers/meet_steps.h"

namespace moiety::moe::peers {

inline constexpr int kTokensOfBlock = kTokenBlock;

// One part of the rows: data, scales, or the scale of a row. `unit` divides all addresses and
// sizes.
struct RowPart {
  const std::byte* from;
  std::byte* to;
  int64_t from_stride, to_stride, bytes, at;  // `at` is its place in a record
  int32_t unit;
};

struct CopyRows {
  static constexpr int kParts = 3;
  RowPart part[kParts];
  int32_t parts;  // how many there are
  // float32 [T, K] and [C]; ranks without tokens, or without slots, have null.
  const std::byte* weights;
  std::byte* values;
  int64_t weight_stride, value_stride, side_at, record;
  bool weighted, has_values;
  bool tail;  // zero the tail, too
};

// Stores the rows that peers need, chunk by chunk, and announces each chunk when it is stored.
struct PushRows {
  Control* control;
  PlanView plan;
  CopyRows rows;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    if (failed(team, c)) return;
    int64_t most = 0;
    for (int r = 0; r < c.ranks; ++r) {
      const int64_t n = r == c.rank ? 0 : plan.rows(c.rank, r);
      most = n > most ? n : most;
    }
    const int64_t tasks = c.chunks(most) * (c.ranks - 1);
    for (int64_t i = team.block(); i < tasks; i += team.blocks()) {
      const ChunkTask task = chunk_task(i, c.rank, c.ranks);
      push(team, c, task);
    }
  }

 private:
  template <class Team>
  MOIETY_STEP void push(Team& team, const Control& c, const ChunkTask& task) const {
    const int r = task.peer;
    const int64_t n = plan.rows(c.rank, r), begin = task.chunk * c.chunk_rows;
    if (begin >= n) return;
    const int64_t end = begin + c.chunk_rows < n ? begin + c.chunk_rows : n;
    const auto row_end = [&](int64_t b) { return plan.row_end(b, r); };
    for (int64_t b = block_of_row(plan.blocks, begin, row_end); b < plan.blocks; ++b) {
      const int64_t first = b * kTokensOfBlock, left = plan.tokens - first;
      team.each_warp(left < kTokensOfBlock ? left : kTokensOfBlock, [&](auto& warp, int64_t i) {
        const int64_t t = first + i, j = plan.row_TR[t * c.ranks + r];
        if (j >= begin && j < end) store_record(warp, t, c.record(r, c.rank, j, rows.record));
      });
      if (row_end(b) >= end) break;
    }
    team.sync();
    team.one([&] { store_release(c.ready_word(r, c.rank, task.chunk), c.entry.word); });
  }

  template <class Warp>
  MOIETY_STEP void store_record(Warp& warp, int64_t t, std::byte* record) const {
    for (int i = 0; i < rows.parts; ++i) {
      const RowPart& p = rows.part[i];
      copy_bytes(warp, record + p.at, p.from + t * p.from_stride, p.bytes, p.unit);
    }
    if (!rows.weighted) return;
    warp.each(plan.topk, [&](int64_t k) {
      store(record + rows.side_at + 4 * k,
            load<uint32_t>(rows.weights + t * rows.weight_stride + 4 * k));
    });
  }
};

// Calls use(warp, source rank, row j, its K slots) for the rows of this rank that have a live pair,
// own ones too, spread over the grid.
template <class Team, class Use>
MOIETY_STEP void for_received(Team& team, const PlanView& plan, Use&& use) {
  for (int s = 0; s < plan.ranks; ++s) {
    const int64_t rows = plan.rows(s, plan.rank);
    for (int64_t first = team.block() * kTokensOfBlock; first < rows;
         first += team.blocks() * kTokensOfBlock) {
      const int64_t left = rows - first;
      team.each_warp(left < kTokensOfBlock ? left : kTokensOfBlock, [&](auto& warp, int64_t i) {
        const int32_t* slot_K = plan.slots(s, first + i);
        if (plan.alive(slot_K) > 0) use(warp, s, first + i, slot_K);
      });
    }
  }
}

// Zeroes the rows and values of slots that no row has.
template <class Team>
MOIETY_STEP void zero_empty(Team& team, const PlanView& plan, const CopyRows& rows) {
  const int64_t end = rows.tail ? plan.capacity : plan.info[kInfoPadded];
  for (int64_t first = team.block() * kTokensOfBlock; first < end;
       first += team.blocks() * kTokensOfBlock) {
    const int64_t left = end - first;
    team.each_warp(left < kTokensOfBlock ? left : kTokensOfBlock, [&](auto& warp, int64_t i) {
      const int64_t slot = first + i;
      if (plan.slot_row[slot] >= 0) return;
      for (int j = 0; j < rows.parts; ++j) {
        const RowPart& p = rows.part[j];
        zero_bytes(warp, p.to + slot * p.to_stride, p.bytes, p.unit);
      }
      if (rows.has_values) {
        warp.one([&] { store(rows.values + slot * rows.value_stride, uint32_t{0}); });
      }
    });
  }
}

// Copies own rows and those that came to their slots.
struct ExpandRows {
  Control* control;
  PlanView plan;
  CopyRows rows;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    for_received(team, plan, [&](auto& warp, int s, int64_t j, const int32_t* slot_K) {
      const bool own = s == c.rank;
      const int64_t t = plan.token(s, j);
      const std::byte* record = own ? nullptr : c.record(c.rank, s, j, rows.record);
      for (int i = 0; i < rows.parts; ++i) {
        const RowPart& p = rows.part[i];
        put(warp, p, own ? p.from + t * p.from_stride : record + p.at, slot_K);
      }
      if (!rows.weighted) return;
      const std::byte* w = own ? rows.weights + t * rows.weight_stride : record + rows.side_at;
      warp.each(plan.topk, [&](int64_t k) {
        if (slot_K[k] < 0) return;
        store(rows.values + slot_K[k] * rows.value_stride, load<uint32_t>(w + 4 * k));
      });
    });
    zero_empty(team, plan, rows);
  }

 private:
  // Reads the part of a row once and writes it to every slot.
  template <class Warp>
  MOIETY_STEP void put(Warp& warp, const RowPart& p, const std::byte* from,
                       const int32_t* slot_K) const {
    with_unit(p.unit, [&]<int n>() {
      warp.each(p.bytes / n, [&](int64_t i) {
        const Unit<n> held = load_unit<n>(from + i * n);
        for (int k = 0; k < plan.topk; ++k) {
          if (slot_K[k] >= 0) store_unit<n>(p.to + slot_K[k] * p.to_stride + i * n, held);
        }
      });
    });
  }
};

}  // namespace moiety::moe::peers
