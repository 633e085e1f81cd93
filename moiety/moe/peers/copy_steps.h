// Rows to experts among GPU ranks: dispatch and, where it only copies, combine_backward. A row goes
// once to each rank that has a live pair of it, into a record there; that rank copies it to its
// slots.
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
  // A team's memory for the rows of a chunk.
  static constexpr int64_t shared_bytes(int64_t chunk_rows) { return 8 * chunk_rows; }
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
    const int64_t count = begin + c.chunk_rows < n ? c.chunk_rows : n - begin;
    // Of the rows, -1 for dead ones; and the slots that direct rows go to.
    auto* token_of = team.template shared<int32_t>(0);
    auto* slot_of = team.template shared<int32_t>(4 * c.chunk_rows);
    team.sync();
    team.each(count, [&](int64_t i) { token_of[i] = -1; });
    team.sync();
    const auto row_end = [&](int64_t b) { return plan.row_end(b, r); };
    for (int64_t b = block_of_row(plan.blocks, begin, row_end); b < plan.blocks; ++b) {
      const int64_t first = b * kTokenBlock, left = plan.tokens - first;
      team.each(left < kTokenBlock ? left : kTokenBlock, [&](int64_t i) {
        const int64_t at = plan.row_TR[(first + i) * c.ranks + r] - begin;
        if (at >= 0 && at < count) token_of[at] = static_cast<int32_t>(first + i);
      });
      if (row_end(b) >= begin + count) break;
    }
    team.sync();
    const Direct direct = c.direct_R[r];
    if (direct) {
      team.each_warp(count, [&](auto& warp, int64_t i) {
        if (token_of[i] < 0) return;
        const int32_t slot = primary_slot(warp, token_of[i], r);
        warp.one([&] { slot_of[i] = slot; });
      });
      team.sync();
    }
    const RowPart data = rows.data_for(direct);
    const RecordPlaces& places = direct ? rows.direct : rows.staged;
    const int64_t pieces = CopyRows::pieces(data);
    team.each_warp(count * pieces, [&](auto& warp, int64_t i) {
      const Split split(i, pieces);
      const int64_t t = token_of[split.item];
      if (t < 0) return;
      std::byte* const record = c.record(r, c.rank, begin + split.item, places.record);
      store_piece(warp, plan, rows, data, t, split.rest,
                  {direct ? direct.row(slot_of[split.item]) : record, record, &places});
    });
    team.sync();
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

// Which received rows a step takes.
struct Taken {
  bool own = true, peers = true;
};

// Calls use(warp, source rank, row j, i) for i < each of the rows that came to this rank and are
// taken, spread over the grid. Returns how often it is called.
template <class Team, class Use>
MOIETY_STEP int64_t for_received(Team& team, const PlanView& plan, const Taken& taken, int64_t each,
                                 Use&& use) {
  int64_t calls = 0;
  for (int n = 0; n < plan.ranks; ++n) {
    const int s = (plan.rank + n) % plan.ranks;
    if (!(n == 0 ? taken.own : taken.peers)) continue;
    const int64_t of = plan.rows(s, plan.rank) * each;
    team.grid_warps(
        of,
        [&](auto& warp, int64_t i) {
          const Split split(i, each);
          use(warp, s, split.item, split.rest);
        },
        calls);
    calls += of;
  }
  return calls;
}

// Zeroes a piece of a row, the first with all that is beside the data.
template <class Warp>
MOIETY_STEP void zero_piece(Warp& warp, const CopyRows& rows, int64_t place, int64_t piece) {
  for (int i = 0; i < (piece == 0 ? rows.parts : 1); ++i) {
    const RowPart& p = rows.part[i];
    if (rows.laid_out(i)) {
      rows.words.put(warp, place, nullptr);
      continue;
    }
    const int64_t most = i > 0 ? p.bytes : int64_t{p.unit} * 32 * kUnits, begin = piece * most;
    const int64_t left = p.bytes - begin;
    zero_bytes(warp, p.to + place * p.to_stride + begin, left < most ? left : most, p.unit);
  }
}

// Zeroes the rows and values of slots that no row has; by a map only the values. A warp has a piece
// of up to 32 slots, of fewer where there are enough warps.
template <class Team>
MOIETY_STEP void zero_empty(Team& team, const PlanView& plan, const CopyRows& rows,
                            int64_t before) {
  const int64_t end = rows.tail ? plan.capacity : plan.info[kInfoPadded], pieces = rows.pieces();
  const int64_t all = ceil_div(end * pieces, team.blocks() * team.warps());
  const int64_t most = all < 4 ? 4 : all < 32 ? all : 32;
  team.grid_warps(
      ceil_div(end, most) * pieces,
      [&](auto& warp, int64_t task) {
        const Split split(task, pieces);
        const int64_t first = most * split.item, n = end - first < most ? end - first : most;
        warp.find(
            n, [&](int64_t i) { return plan.slot_row[first + i] < 0; },
            [&](int64_t i) {
              const int64_t slot = first + i;
              if (!rows.source) zero_piece(warp, rows, slot, split.rest);
              if (rows.has_values && split.rest == 0) {
                warp.one([&] { store(rows.values + slot * rows.value_stride, uint32_t{0}); });
              }
            });
      },
      before);
}

// Copies own rows and those that came to their slots; with the own ones it zeroes what no row has.
struct ExpandRows {
  static constexpr int kThreads = 256;
  Control* control;
  PlanView plan;
  CopyRows rows;
  Taken taken;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    const int64_t taken_pieces = for_received(
        team, plan, taken, rows.pieces(),
        [&](auto& warp, int s, int64_t j, int64_t piece) { take(warp, c, s, j, piece); });
    if (taken.own) zero_empty(team, plan, rows, taken_pieces);
  }

 private:
  // Reads a piece of a row once and writes it to every slot.
  template <class Warp>
  MOIETY_STEP void take(Warp& warp, const Control& c, int s, int64_t j, int64_t piece) const {
    const int32_t* slot_K = plan.slots(s, j);
    const auto live = warp.live(plan.topk, [&](int64_t k) { return slot_K[k]; });
    if (live.count() == 0) return;
    const bool own = s == c.rank, direct = !own && c.direct_R[c.rank];
    const RecordPlaces& at = direct ? rows.direct : rows.staged;
    const int64_t t = own ? plan.token(s, j) : 0;
    const std::byte* record = own ? nullptr : c.record(c.rank, s, j, at.record);
    const auto from = [&](int i) {
      const RowPart& p = rows.part[i];
      return own ? p.from + t * p.from_stride : record + at.at[i];
    };
    const auto put = [&](int i, const std::byte* row, int64_t of) {
      const RowPart& p = rows.part[i];
      move_piece(warp, p, row, of, [&](auto&& store) {
        rows.places(live, [&](int64_t place) { store(p.to + place * p.to_stride); });
      });
    };
    if (!direct) {
      put(0, from(0), piece);
    } else if (live.count() > 1) {
      // Its data lies in its first slot.
      const RowPart& p = rows.part[0];
      const int64_t first = live.first();
      move_piece(warp, p, p.to + first * p.to_stride, piece, [&](auto&& store) {
        live.each([&](int, int64_t slot) {
          if (slot != first) store(p.to + slot * p.to_stride);
        });
      });
    }
    if (piece > 0) return;
    for (int i = 1; i < rows.parts; ++i) {
      const RowPart& p = rows.part[i];
      if (rows.laid_out(i)) {
        const std::byte* const row = from(i);
        rows.places(live, [&](int64_t place) { rows.words.put(warp, place, row); });
        continue;
      }
      for (int64_t of = 0; of * p.unit * 32 * kUnits < p.bytes; ++of) put(i, from(i), of);
    }
    if (!rows.weighted) return;
    const std::byte* w = own ? rows.weights + t * rows.weight_stride : record + at.side_at;
    warp.each(plan.topk, [&](int64_t k) {
      if (slot_K[k] < 0) return;
      store(rows.values + slot_K[k] * rows.value_stride, load<uint32_t>(w + 4 * k));
    });
  }
};

// Pushes rows in the first blocks of a grid, and looks after the own ones in the others: the one is
// held back by links, the other by memory.
template <class Own>
struct PushBeside {
  static constexpr int kThreads = PushRows::kThreads;
  static_assert(kThreads == Own::kThreads);
  PushRows push;
  Own own;
  int64_t pushers;  // blocks

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    if (team.block() < pushers) {
      Team part = team.part(0, pushers);
      push(part);
    } else {
      Team part = team.part(pushers, team.blocks() - pushers);
      own(part);
    }
  }
};

}  // namespace moiety::moe::peers
