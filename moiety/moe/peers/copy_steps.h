// Rows to experts among GPU ranks: dispatch and, where it only copies, combine_backward. A row goes
// once to each rank that has a live pair of it, into a record there; that rank copies it to its
// slots.
#pragma once

#include "moiety/moe/peers/push_rows.h"

namespace moiety::moe::peers {

// Which received rows a step takes.
struct Taken {
  bool own = true, peers = true;
};

// What a thread needs of a control for every row that came, and keeps: behind a store it would read
// all of it anew. The first peer's records, and from there to the next one's.
struct Arrived {
  int rank;
  bool direct;
  const std::byte* records;
  int64_t of_peer;

  MOIETY_STEP const std::byte* record(int s, int64_t j, int64_t stride) const {
    return records + (s < rank ? s : s - 1) * of_peer + j * stride;
  }
};
MOIETY_STEP Arrived arrived(const Control& c, const CopyRows& rows) {
  const bool direct = static_cast<bool>(c.direct_R[c.rank]);
  const int64_t stride = (direct ? rows.direct : rows.staged).record;
  return {c.rank, direct, c.record(c.rank, c.rank == 0 ? 1 : 0, 0, stride), c.rows_max * stride};
}

// Calls use(warp, source rank, row j, i) for i < each of the rows that came to this rank and are
// taken, spread over the grid.
template <class Team, class Use>
MOIETY_STEP void for_received(Team& team, const PlanView& plan, const Taken& taken, int64_t each,
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

// Copies own rows and those that came to their slots; with the own ones it zeroes what no row has,
// behind them or, where there are few of them, before them.
struct ExpandRows {
  static constexpr int kThreads = 256;
  Control* control;
  PlanView plan;
  CopyRows rows;
  Taken taken;
  bool zeroes_first = false;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    if (zeroes_first) zero_empty(team, plan, rows, 0);
    const Arrived from = arrived(c, rows);
    for_received(
        team, plan, taken, rows.pieces(),
        [&](auto& warp, int s, int64_t j, int64_t piece) { take(warp, from, s, j, piece); });
  }
  // Zeroes what no row has.
  template <class Team>
  MOIETY_STEP void behind(Team& team) const {
    if (zeroes_first || !taken.own || failed(team, *control)) return;
    int64_t rows_taken = plan.rows(plan.rank, plan.rank);
    for (int s = 0; s < plan.ranks && taken.peers; ++s) {
      if (s != plan.rank) rows_taken += plan.rows(s, plan.rank);
    }
    zero_empty(team, plan, rows, rows_taken * rows.pieces());
  }

 private:
  // Reads a piece of a row once and writes it to every slot.
  template <class Warp>
  MOIETY_STEP void take(Warp& warp, const Arrived& came, int s, int64_t j, int64_t piece) const {
    const int32_t* slot_K = plan.slots(s, j);
    const auto live = warp.live(plan.topk, [&](int64_t k) { return slot_K[k]; });
    if (live.count() == 0) return;
    const bool own = s == came.rank, direct = !own && came.direct;
    const RecordPlaces& at = direct ? rows.direct : rows.staged;
    const int64_t t = own ? plan.token(s, j) : 0;
    const std::byte* record = own ? nullptr : came.record(s, j, at.record);
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
      if constexpr (requires { own.behind(part); }) own.behind(part);
    }
  }
};

}  // namespace moiety::moe::peers
