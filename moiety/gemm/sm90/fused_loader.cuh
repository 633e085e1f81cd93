// The warps of fused.cuh that fill the ring of stages, and its shared memory.
#pragma once

#include "moiety/gemm/sm90/fused.h"
#include "moiety/gemm/sm90/stages.cuh"

namespace moiety::gemm::sm90 {

// The stages of both operands of a tile.
template <int kColumnsOfTile, bool kGathersRows, bool kBlocksInPairs>
struct FusedStages {
  static constexpr int kColumns = kColumnsOfTile;
  static constexpr bool kGathers = kGathersRows, kInPairs = kBlocksInPairs;
  static constexpr int kTogether = kInPairs ? kPair : 1;  // blocks
  static constexpr bool kEven = false;                    // TileWalk
  using Rows = WholeTiles;                                // PairWalk
  static constexpr bool kMeets = false;                   // Layout
  static constexpr int kTileM = kTileRows;
  static constexpr int kHalves = 1;  // times 64 rows, of a group that multiplies
  static constexpr int kStages = kColumns > 128 ? 4 : 5;
  static constexpr int kArrivals = kGathers ? kWarpGroup + 1 : 1;  // that fill a stage
  static constexpr int kA = kTileRows * kDepth * 2;
  static constexpr int kB = kColumns * kDepth * 2;
  static constexpr int kStage = kA + kB;
};

// Stages, the rows that groups hand to those who compute activations, what these have asked for of H
// and will store, barriers, and tables.
template <GemmOp kOp, int kColumnsOfTile, bool kGathersRows, bool kBlocksInPairs>
struct FusedLayout : FusedStages<kColumnsOfTile, kGathersRows, kBlocksInPairs> {
  using Base = FusedStages<kColumnsOfTile, kGathersRows, kBlocksInPairs>;
  using Base::kColumns, Base::kStages, Base::kStage;
  static constexpr bool kHolds = false;  // fused_held.cuh
  // Who computes activations: warps, with blocks of 16 rows of a tile, one for each warp that
  // multiplies.
  static constexpr int kWriters = 4, kBlocks = kTileRows / 16;
  static constexpr int kThreads = (kGroups + 2) * kWarpGroup;
  static constexpr int kMultiplyRegisters = 152, kLoadRegisters = 56, kWriteRegisters = 152;
  // A block lies in boxes of 16 rows of 32 columns, or of 64, which the copy engine moves with half as
  // many requests, where the columns of a tile are neighbours in memory. A slot has 8 rows of as many
  // columns of both halves of H.
  static constexpr bool kWide = kOp != GemmOp::kTN;
  static constexpr int kBoxRow = kWide ? 128 : 64;  // bytes
  static constexpr int kBox = 16 * kBoxRow, kBlock = 16 * kColumns * 2;
  static constexpr int kSlots = kWide ? 2 : 4;  // of a writer
  static constexpr int kSlot = 16 * kBoxRow;
  static constexpr int kRows = kStages * kStage;
  static constexpr int kHidden = kRows + kBlocks * kBlock;
  static constexpr int kBarriers = kHidden + kWriters * kSlots * kSlot;
  static constexpr int kHanded = kBarriers + 2 * kStages * 8;
  static constexpr int kCome = kHanded + 2 * kBlocks * 8;  // of slots
  static constexpr int kTiles = (kCome + kWriters * kSlots * 8 + 15) / 16 * 16;
  static constexpr int kTable = kTiles + kTilesAhead * static_cast<int>(sizeof(Tile));
  static constexpr int kBytes = kTable + static_cast<int>(sizeof(GroupTable));
  static_assert(kBytes <= kMostShared);
};

template <GemmOp kOp, class L>
class FusedLoader {
 public:
  __device__ FusedLoader(const TileGemm& g, const FusedMaps& maps, uint32_t base)
      : g_(g),
        maps_(maps),
        ring_{base},
        thread_(threadIdx.x - kGroups * kWarpGroup),
        copies_(__shfl_sync(~0u, thread_ / 32, 0) == 0) {}

  // Before the first tile.
  __device__ void begin(const Tile& t) {
    if constexpr (L::kGathers) ahead_ = source_of(t);
  }
  // `next` is the tile after it.
  __device__ void tile(const Tile& t, const Tile& next) {
    matrix_ = matrix_place(g_, maps_.products.matrices, t.group, 0, 0);
    if constexpr (L::kGathers) {
      find_rows(t);
      ahead_ = source_of(next);
    }
    for (int step = 0; step < t.steps; step += 2) {
      load<0>(t, step);
      if (step + 1 < t.steps) load<1>(t, step + 1);
      if constexpr (L::kGathers) {
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) rows_[i] += 2 * kDepth * 2;
      }
    }
  }
  // Announces that no tile follows.
  __device__ void end() {
    if (L::kGathers) wait_copies();
    barrier_wait(ring_.empty(), ring_.phase ^ 1);
    if (L::kGathers) barrier_arrive(ring_.full());
    if (copies_ && elect_one()) barrier_arrive(ring_.full());
  }

 private:
  template <int kOdd>
  __device__ void load(const Tile& t, int step) {
    barrier_wait(ring_.empty(), ring_.phase ^ 1);
    if (copies_ && elect_one()) copy_tiles(t, step);
    if constexpr (L::kGathers) {
      gather<kOdd>(step);
      arrive_with_copies(ring_.full());
    }
    ring_.next();
  }

  // The operands that the copy engine brings.
  __device__ void copy_tiles(const Tile& t, int step) {
    barrier_arrive_expecting(ring_.full(), (L::kGathers ? 0 : L::kA) + L::kB);
    const int k = step * kDepth;
    if constexpr (!L::kGathers) {
      load_tile(ring_.a(), maps_.products.a, ring_.full(),
                ragged_place(k, t.begin + t.row, t.live));
    }
    if constexpr (L::kInPairs) {
      load_halves<kOp>(ring_, maps_.products.b, t.shared, [&](int half, int j) -> Place {
        if (kOp == GemmOp::kTN) return {k, weight_row(t, half), matrix_.x, matrix_.y};
        return {t.column + j, k + half * (kDepth / 2), matrix_.x, matrix_.y};
      });
    } else if constexpr (kOp == GemmOp::kTN) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_tile(ring_.b() + half * (L::kB / 2), maps_.products.b, ring_.full(),
                  {k, weight_row(t, half), matrix_.x, matrix_.y});
      }
    } else {
#pragma unroll
      for (int j = 0; j < L::kColumns; j += 64) {
        load_tile(ring_.b() + j / 64 * kPiece, maps_.products.b, ring_.full(),
                  {t.column + j, k, matrix_.x, matrix_.y});
      }
    }
  }
  // The row of the weight that half of a tile's columns begins with.
  __device__ int weight_row(const Tile& t, int half) const {
    return maps_.pairs > 0 ? t.column / 2 + half * maps_.pairs
                           : t.column + half * (L::kColumns / 2);
  }

  // ---- Gathered rows: a thread copies pieces of 16 bytes at one place of rows kApart apart, with
  // few instructions where it can: else who loads would be slower than who multiplies.
  static constexpr int kApart = kWarpGroup / 8, kRowsEach = kTileRows / kApart;
  // The source of the lane's row of a tile, of the 32 that its warp copies; -1: zeros.
  __device__ int32_t source_of(const Tile& t) const {
    const int lane = thread_ % 32, row = thread_ / 32 * 4 + lane % 4 + lane / 4 * kApart;
    return t.group >= 0 && row < t.live ? g_.a.source[t.begin + t.row + row] : -1;
  }
  __device__ void find_rows(const Tile& t) {
    const int64_t stride = g_.a.stride * 2;
    const char* data = static_cast<const char*>(g_.a.data) + thread_ % 8 * 16;
    const int32_t mine = ahead_ < g_.a.sources ? ahead_ : -1;
    live_ = 0;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int32_t from = __shfl_sync(~0u, mine, 4 * i + thread_ % 32 / 8);
      const bool live = from >= 0;
      rows_[i] = data + (live ? from : 0) * stride;
      live_ |= uint32_t{live} << i;
    }
    all_live_ = __all_sync(~0u, live_ == (1u << kRowsEach) - 1);
  }
  // Of an odd step, counted from the last even one's address.
  template <int kOdd>
  __device__ void gather(int step) {
    constexpr int kFrom = kOdd * kDepth * 2;
    const int piece = thread_ % 8, row = thread_ / 8;
    const uint32_t to = ring_.a() + row * 128 + (piece ^ row % 8) * 16;
    const int left = static_cast<int>(g_.k) - step * kDepth;
    if (all_live_ && left >= kDepth) return gather_whole<kFrom>(to);
    const int bytes = min(max((left - piece * 8) * 2, 0), 16);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      copy_16(to + i * kApart * 128, rows_[i] + kFrom, live_ >> i & 1 ? bytes : 0);
    }
  }
  template <int kFrom, int i = 0>
  __device__ void gather_whole(uint32_t to) const {
    copy_whole_16<i * kApart * 128, kFrom>(to, rows_[i]);
    if constexpr (i + 1 < kRowsEach) gather_whole<kFrom, i + 1>(to);
  }

  const TileGemm& g_;
  const FusedMaps& maps_;
  Ring<L> ring_;
  int thread_;
  bool copies_;  // what the copy engine brings is asked for by this warp
  Place matrix_;
  int32_t ahead_;  // the source of the lane's row of the next tile
  const char* rows_[kRowsEach];
  uint32_t live_;  // of those, a bit each
  bool all_live_;  // and of the other threads of the warp
};

}  // namespace moiety::gemm::sm90
