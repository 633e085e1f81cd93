// Rows to experts among GPU ranks: dispatch and, where it only copies, combine_backward. A row goes
// once to each rank that has a live pair of it, into a record there; that rank copies it to its
// slots.
#pragma once

#include "moiety/moe/peers/meet_steps.h"
#include "moiety/moe/peers/scale_words.h"

namespace moiety::moe::peers {

// One part of the rows: data, scales, or the scale of a row. `unit` divides all addresses and
// sizes.
struct RowPart {
  const std::byte* from;
  std::byte* to;
  int64_t from_stride, to_stride, bytes, at;  // `at` is its place in a record
  int32_t unit;
};

// Units that a lane moves together: their loads wait together.
inline constexpr int kUnits = 4;

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
  // [C]: a row has one place among the outputs, by a map; null: its slots are its places.
  const int32_t* source;
  ScaleWords words;  // of part 1, if a layout of GEMMs is wanted

  MOIETY_HD_INLINE bool laid_out(int i) const { return i == 1 && words.step > 0; }
  // Calls f(place) for those of a row with these slots.
  template <class Live, class F>
  MOIETY_STEP void places(const Live& live, F&& f) const {
    bool first = true;
    live.each([&](int, int64_t slot) {
      if (!source) return f(slot);
      if (first) f(source[slot]);
      first = false;
    });
  }
  // A row is moved in so many pieces, each by a warp; the first has all that is beside the data.
  MOIETY_HD_INLINE int64_t pieces() const {
    return ceil_div(part[0].bytes, int64_t{part[0].unit} * 32 * kUnits);
  }
};

// Moves a piece of a row: store(unit number, unit) for its units.
template <class Warp, class Store>
MOIETY_STEP void move_piece(Warp& warp, const RowPart& p, const std::byte* from, int64_t piece,
                            Store&& store) {
  with_unit(p.unit, [&]<int n>() {
    const int64_t units = p.bytes / n;
    warp.lanes([&](int lane) {
      const int64_t first = piece * 32 * kUnits + lane;
      Unit<n> held[kUnits];
      MOIETY_UNROLL
      for (int i = 0; i < kUnits; ++i) {
        if (first + 32 * i < units) held[i] = load_unit<n>(from + (first + 32 * i) * n);
      }
      store([&](std::byte* to) {
        MOIETY_UNROLL
        for (int i = 0; i < kUnits; ++i) {
          if (first + 32 * i < units) store_unit<n>(to + (first + 32 * i) * n, held[i]);
        }
      });
    });
  });
}

// Stores a piece of row t into a record.
template <class Warp>
MOIETY_STEP void store_piece(Warp& warp, const PlanView& plan, const CopyRows& rows, int64_t t,
                             int64_t piece, std::byte* record) {
  const RowPart& data = rows.part[0];
  move_piece(warp, data, data.from + t * data.from_stride, piece,
             [&](auto&& store) { store(record + data.at); });
  if (piece > 0) return;
  for (int i = 1; i < rows.parts; ++i) {
    const RowPart& p = rows.part[i];
    copy_bytes(warp, record + p.at, p.from + t * p.from_stride, p.bytes, p.unit);
  }
  if (!rows.weighted) return;
  warp.each(plan.topk, [&](int64_t k) {
    store(record + rows.side_at + 4 * k,
          load<uint32_t>(rows.weights + t * rows.weight_stride + 4 * k));
  });
}

// Stores the rows that peers need, chunk by chunk, and announces each chunk when it is stored.
struct PushRows {
  static constexpr int kThreads = 256;
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
    auto* token_of = team.template shared<int32_t>(0);  // of the chunk's rows; -1 for dead ones
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
    const int64_t pieces = rows.pieces();
    team.each_warp(count * pieces, [&](auto& warp, int64_t i) {
      const Split split(i, pieces);
      const int64_t t = token_of[split.item];
      if (t < 0) return;
      store_piece(warp, plan, rows, t, split.rest,
                  c.record(r, c.rank, begin + split.item, rows.record));
    });
    team.sync();
    team.one([&] { store_release(c.ready_word(r, c.rank, task.chunk), c.entry.word); });
  }
};

// Which received rows a step takes.
struct Taken {
  bool own = true, peers = true;
};

// Calls use(warp, source rank, row j, i) for i < each of the rows that came to this rank and are
// taken, spread over the grid.
template <class Team, class Use>
MOIETY_STEP void for_received(Team& team, const PlanView& plan, const Taken& taken, int64_t each,
                              Use&& use) {
  for (int n = 0; n < plan.ranks; ++n) {
    const int s = (plan.rank + n) % plan.ranks;
    if (!(n == 0 ? taken.own : taken.peers)) continue;
    team.grid_warps(plan.rows(s, plan.rank) * each, [&](auto& warp, int64_t i) {
      const Split split(i, each);
      use(warp, s, split.item, split.rest);
    });
  }
}

template <class Warp>
MOIETY_STEP void zero_row(Warp& warp, const CopyRows& rows, int64_t place) {
  for (int i = 0; i < rows.parts; ++i) {
    const RowPart& p = rows.part[i];
    if (rows.laid_out(i)) {
      rows.words.put(warp, place, nullptr);
    } else {
      zero_bytes(warp, p.to + place * p.to_stride, p.bytes, p.unit);
    }
  }
}

// Zeroes the rows and values of slots that no row has; by a map only the values.
template <class Team>
MOIETY_STEP void zero_empty(Team& team, const PlanView& plan, const CopyRows& rows) {
  const int64_t end = rows.tail ? plan.capacity : plan.info[kInfoPadded];
  team.grid_warps(ceil_div(end, 32), [&](auto& warp, int64_t group) {
    const int64_t first = 32 * group, n = end - first < 32 ? end - first : 32;
    warp.find(
        n, [&](int64_t i) { return plan.slot_row[first + i] < 0; },
        [&](int64_t i) {
          const int64_t slot = first + i;
          if (!rows.source) zero_row(warp, rows, slot);
          if (rows.has_values) {
            warp.one([&] { store(rows.values + slot * rows.value_stride, uint32_t{0}); });
          }
        });
  });
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
    for_received(team, plan, taken, rows.pieces(),
                 [&](auto& warp, int s, int64_t j, int64_t piece) { take(warp, c, s, j, piece); });
    if (taken.own) zero_empty(team, plan, rows);
  }

 private:
  // Reads a piece of a row once and writes it to every slot.
  template <class Warp>
  MOIETY_STEP void take(Warp& warp, const Control& c, int s, int64_t j, int64_t piece) const {
    const int32_t* slot_K = plan.slots(s, j);
    const auto live = warp.live(plan.topk, [&](int64_t k) { return slot_K[k]; });
    if (live.count() == 0) return;
    const bool own = s == c.rank;
    const int64_t t = own ? plan.token(s, j) : 0;
    const std::byte* record = own ? nullptr : c.record(c.rank, s, j, rows.record);
    const auto put = [&](const RowPart& p, int64_t of) {
      move_piece(warp, p, own ? p.from + t * p.from_stride : record + p.at, of, [&](auto&& store) {
        rows.places(live, [&](int64_t place) { store(p.to + place * p.to_stride); });
      });
    };
    put(rows.part[0], piece);
    if (piece > 0) return;
    for (int i = 1; i < rows.parts; ++i) {
      const RowPart& p = rows.part[i];
      if (rows.laid_out(i)) {
        const std::byte* from = own ? p.from + t * p.from_stride : record + p.at;
        rows.places(live, [&](int64_t place) { rows.words.put(warp, place, from); });
        continue;
      }
      for (int64_t of = 0; of * p.unit * 32 * kUnits < p.bytes; ++of) put(p, of);
    }
    if (!rows.weighted) return;
    const std::byte* w = own ? rows.weights + t * rows.weight_stride : record + rows.side_at;
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
