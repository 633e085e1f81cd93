// Rows that go to experts among GPU ranks, by their parts, and how a warp moves a piece of one.
#pragma once

#include "moiety/moe/peers/meet_steps.h"
#include "moiety/moe/peers/scale_words.h"

namespace moiety::moe::peers {

// One part of the rows: data, scales, or the scale of a row. `unit` divides all addresses and
// sizes.
struct RowPart {
  const std::byte* from;
  std::byte* to;
  int64_t from_stride, to_stride, bytes;
  int32_t unit;
};
// The places of a row's parts in a record, and of the floats behind them.
struct RecordPlaces {
  int64_t at[3], side_at, record;
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
  int64_t weight_stride, value_stride;
  RecordPlaces staged, direct;  // records of a direct rank lack the data
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
  MOIETY_HD_INLINE int64_t pieces() const { return pieces(part[0]); }
  MOIETY_HD_INLINE static int64_t pieces(const RowPart& p) {
    return ceil_div(p.bytes, int64_t{p.unit} * 32 * kUnits);
  }
  // The data, if it goes to rows of a peer.
  MOIETY_STEP RowPart data_for(const Direct& to) const {
    RowPart out = part[0];
    const auto bits = reinterpret_cast<uintptr_t>(to.base) | static_cast<uintptr_t>(to.pitch);
    while (bits % static_cast<unsigned>(out.unit) != 0)
      out.unit = out.unit == 16 ? 4 : out.unit / 2;
    return out;
  }
};

// Moves a piece of a row: store(unit number, unit) for its units.
template <class Warp, class Store>
MOIETY_STEP void move_piece(Warp& warp, const RowPart& p, const std::byte* from, int64_t piece,
                            Store&& store) {
  with_unit(p.unit, [&]<int n>() {
    const int64_t units = p.bytes / n;
    warp.lanes([&](int lane) {
      // Small units are rare and go one after the other, so that they take no registers.
      constexpr int kHeld = n == 16 ? kUnits : 1;
      for (int begin = 0; begin < kUnits; begin += kHeld) {
        const int64_t first = (piece * kUnits + begin) * 32 + lane;
        Unit<n> held[kHeld];
        MOIETY_UNROLL
        for (int i = 0; i < kHeld; ++i) {
          if (first + 32 * i < units) held[i] = load_unit<n>(from + (first + 32 * i) * n);
        }
        store([&](std::byte* to) {
          MOIETY_UNROLL
          for (int i = 0; i < kHeld; ++i) {
            if (first + 32 * i < units) store_unit<n>(to + (first + 32 * i) * n, held[i]);
          }
        });
      }
    });
  });
}

}  // namespace moiety::moe::peers
