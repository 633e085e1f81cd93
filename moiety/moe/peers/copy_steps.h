// Rows to experts among GPU ranks: dispatch and, where it only copies, combine_backward. A row goes
// once to each rank that has a live pair of it, into a record there; that rank copies it to its
// slots.
#pragma once

#include "moiety/moe/peers/move_steps.h"

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
    warp.lanes([&](int lane) {
      const int64_t first = piece * 32 * kUnits + lane;
      const auto left = static_cast<int32_t>(p.bytes / n - first);  // units from this lane's on
      const std::byte* const begin = from + first * n;
      Unit<n> held[kUnits];
      MOIETY_UNROLL
      for (int i = 0; i < kUnits; ++i) {
        if (32 * i < left) held[i] = load_unit<n>(begin + 32 * i * n);
      }
      store([&](std::byte* to) {
        std::byte* const out = to + first * n;
        MOIETY_UNROLL
        for (int i = 0; i < kUnits; ++i) {
          if (32 * i < left) store_unit<n>(out + 32 * i * n, held[i]);
        }
      });
    });
  });
}

// Stores the rows that peers need, chunk by chunk, and announces each chunk when it is stored.
struct PushRows {
  PlanView plan;
  CopyRows rows;

  template <class Team>
  MOIETY_STEP void operator()(Team& team, const Control& c) const {
    auto* token_of = team.template shared<int32_t>(0);  // of the chunk's rows; -1 for dead ones
    const auto rows_of = [&](int r) { return plan.rows(c.rank, r); };
    uint64_t* announced = nullptr;  // of the chunk before
    const auto announce = [&] {
      // All of the team have met since they stored the chunk.
      team.one([&] {
        if (announced) store_release(announced, c.entry.word);
      });
    };
    for_chunks(team, c, rows_of, [&](const ChunkTask& task, int64_t begin, int64_t count) {
      const int r = task.peer;
      team.each(count, [&](int64_t i) { token_of[i] = -1; });
      team.sync();
      find_tokens(team, c, r, begin, count, token_of);
      team.sync();
      announce();  // it takes one thread a while, and the others go on
      const int64_t pieces = rows.pieces();
      team.each_warp(count * pieces, [&](auto& warp, int64_t i) {
        const Split split(i, pieces);
        const int64_t t = token_of[split.item];
        if (t < 0) return;
        store_piece(warp, t, split.rest, c.record(r, c.rank, begin + split.item, rows.record));
      });
      announced = c.ready_word(r, c.rank, task.chunk);
      team.sync();
    });
    announce();
  }

 private:
  template <class Team>
  MOIETY_STEP void find_tokens(Team& team, const Control& c, int r, int64_t begin, int64_t count,
                               int32_t* token_of) const {
    const auto row_end = [&](int64_t b) { return plan.row_end(b, r); };
    for (int64_t b = block_of_row(plan.blocks, begin, row_end); b < plan.blocks; ++b) {
      const int64_t first = b * kTokenBlock, left = plan.tokens - first;
      team.each(left < kTokenBlock ? left : kTokenBlock, [&](int64_t i) {
        const int64_t at = plan.row_TR[(first + i) * c.ranks + r] - begin;
        if (at >= 0 && at < count) token_of[at] = static_cast<int32_t>(first + i);
      });
      if (row_end(b) >= begin + count) break;
    }
  }

  template <class Warp>
  MOIETY_STEP void store_piece(Warp& warp, int64_t t, int64_t piece, std::byte* record) const {
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
};

// Calls use(warp, row j, i) for i < each of the rows of own tokens for this rank, spread over the
// grid.
template <class Team, class Use>
MOIETY_STEP void for_own(Team& team, const PlanView& plan, int64_t each, Use&& use) {
  team.grid_warps(plan.rows(plan.rank, plan.rank) * each, [&](auto& warp, int64_t i) {
    const Split split(i, each);
    use(warp, split.item, split.rest);
  });
}

// Zeroes the rows and values of slots that no row has.
template <class Team>
MOIETY_STEP void zero_empty(Team& team, const PlanView& plan, const CopyRows& rows) {
  const int64_t end = rows.tail ? plan.capacity : plan.info[kInfoPadded];
  team.grid_warps(ceil_div(end, 32), [&](auto& warp, int64_t group) {
    const int64_t first = 32 * group, n = end - first < 32 ? end - first : 32;
    warp.find(
        n, [&](int64_t i) { return plan.slot_row[first + i] < 0; },
        [&](int64_t i) {
          const int64_t slot = first + i;
          for (int j = 0; j < rows.parts; ++j) {
            const RowPart& p = rows.part[j];
            zero_bytes(warp, p.to + slot * p.to_stride, p.bytes, p.unit);
          }
          if (rows.has_values) {
            warp.one([&] { store(rows.values + slot * rows.value_stride, uint32_t{0}); });
          }
        });
  });
}

// Copies own rows and those that came to their slots, and zeroes what no row has.
struct ExpandRows {
  static constexpr int kThreads = 384, kBlocks = 2;
  static constexpr bool kHome = false;
  Control* control;
  PlanView plan;
  CopyRows rows;

  template <class Team>
  MOIETY_STEP void operator()(Team& team, Control& c, Taking taking) const {
    const int64_t pieces = rows.pieces();
    if (taking == Taking::kFirst) {
      for_own(team, plan, pieces,
              [&](auto& warp, int64_t j, int64_t piece) { take(warp, c, c.rank, j, piece); });
      zero_empty(team, plan, rows);
    }
    take_rows(team, c, plan, taking, pieces,
              [&](auto& warp, int s, int64_t j, int64_t piece) { take(warp, c, s, j, piece); });
  }

 private:
  // Reads a piece of a row once and writes it to every slot.
  template <class Warp>
  MOIETY_STEP void take(Warp& warp, const Control& c, int s, int64_t j, int64_t piece) const {
    const int32_t* slot_K = plan.slots(s, j);
    const auto live = warp.live(
        plan.topk, [&](int64_t k) { return slot_K[k]; }, [](int64_t) { return 1.0f; });
    if (live.count() == 0) return;
    const bool own = s == c.rank;
    const int64_t t = own ? plan.token(s, j) : 0;
    const std::byte* record = own ? nullptr : c.record(c.rank, s, j, rows.record);
    const auto put = [&](const RowPart& p, int64_t of) {
      move_piece(warp, p, own ? p.from + t * p.from_stride : record + p.at, of, [&](auto&& store) {
        live.each([&](int, int64_t slot) { store(p.to + slot * p.to_stride); });
      });
    };
    put(rows.part[0], piece);
    if (piece > 0) return;
    for (int i = 1; i < rows.parts; ++i) {
      const RowPart& p = rows.part[i];
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

}  // namespace moiety::moe::peers
