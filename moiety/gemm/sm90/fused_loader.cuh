// The warp group of fused.cuh that fills the ring of stages, and its shared memory.
#pragma once

#include "moiety/gemm/sm90/fused.h"
#include "moiety/gemm/sm90/stages.cuh"

namespace moiety::gemm::sm90 {

// Stages, the rows that groups hand to those who compute activations, words of H that these have
// asked for, barriers, and tables.
template <GemmOp kOp, int kColumnsOfTile, bool kGathersRows>
struct FusedLayout {
  static constexpr int kColumns = kColumnsOfTile, kColumnsAtOnce = kColumns;
  static constexpr bool kGathers = kGathersRows;
  static constexpr int kHalves = 1;  // times 64 rows, of a group that multiplies
  static constexpr int kStages = kColumns > 128 ? 4 : 5;
  static constexpr int kArrivals = kGathers ? kWarpGroup + 1 : 1;  // that fill a stage
  static constexpr int kA = kTileRows * kDepth * 2;
  static constexpr int kB = kColumns * kDepth * 2;
  static constexpr int kStage = kA + kB;
  // Who computes activations: warps, with blocks of 16 rows of a tile, one for each warp that
  // multiplies.
  static constexpr int kWriters = 4, kBlocks = kTileRows / 16;
  static constexpr int kThreads = (kGroups + 1) * kWarpGroup + kWriters * 32;
  static constexpr int kPitch = kColumns * 2;  // bytes from row to row of a block
  static constexpr int kBlock = 16 * kPitch;
  static constexpr int kSlots = 4, kSlot = 1024;  // of a writer: 8 rows of 32 columns, twice
  static constexpr int kRows = kStages * kStage;
  static constexpr int kHidden = kRows + kBlocks * kBlock;
  static constexpr int kBarriers = kHidden + (kOp == GemmOp::kNN ? kWriters * kSlots * kSlot : 0);
  static constexpr int kHanded = kBarriers + 2 * kStages * 8;
  static constexpr int kTiles = (kHanded + 2 * kBlocks * 8 + 15) / 16 * 16;
  static constexpr int kTable = kTiles + kTilesAhead * static_cast<int>(sizeof(Tile));
  static constexpr int kBytes = kTable + static_cast<int>(sizeof(GroupTable));
  static_assert(kBytes <= 227 * 1024);
};

template <GemmOp kOp, class L>
class FusedLoader {
 public:
  __device__ FusedLoader(const TileGemm& g, const FusedMaps& maps, uint32_t base)
      : g_(g), maps_(maps), ring_{base}, thread_(threadIdx.x % kWarpGroup) {}

  __device__ void tile(const Tile& t) {
    if constexpr (L::kGathers) find_rows(t);
    for (int step = 0; step < t.steps; ++step) {
      barrier_wait(ring_.empty(), ring_.phase ^ 1);
      if (thread_ == 0) copy_tiles(t, step);
      if constexpr (L::kGathers) {
        gather(step);
        arrive_with_copies(ring_.full());
      }
      ring_.next();
    }
  }
  // Announces that no tile follows.
  __device__ void end() {
    if (L::kGathers) wait_copies();
    barrier_wait(ring_.empty(), ring_.phase ^ 1);
    barrier_arrive(ring_.full());
    if (L::kGathers && thread_ == 0) barrier_arrive(ring_.full());
  }

 private:
  // The operands that the copy engine brings.
  __device__ void copy_tiles(const Tile& t, int step) {
    barrier_arrive_expecting(ring_.full(), (L::kGathers ? 0 : L::kA) + L::kB);
    const int k = step * kDepth;
    if constexpr (!L::kGathers) {
      load_tile(ring_.a(), maps_.products.a, ring_.full(),
                ragged_place(k, t.begin + t.row, t.live));
    }
    if constexpr (kOp == GemmOp::kTN) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        load_tile(ring_.b() + half * (L::kB / 2), maps_.products.b, ring_.full(),
                  matrix_place(g_, maps_.products.matrices, t.group, k, weight_row(t, half)));
      }
    } else {
      for (int j = 0; j < L::kColumns; j += 64) {
        load_tile(ring_.b() + j / 64 * kPiece, maps_.products.b, ring_.full(),
                  matrix_place(g_, maps_.products.matrices, t.group, t.column + j, k));
      }
    }
  }
  // The row of the weight that half of a tile's columns begins with.
  __device__ int weight_row(const Tile& t, int half) const {
    return maps_.pairs > 0 ? t.column / 2 + half * maps_.pairs
                           : t.column + half * (L::kColumns / 2);
  }

  // ---- Gathered rows: a thread copies pieces of 16 bytes at one place of rows 16 apart.
  static constexpr int kApart = kWarpGroup / 8, kRowsEach = kTileRows / kApart;
  // Where a row begins, in units of 16 bytes, or that it is a row of zeros, of which nothing is
  // read.
  static constexpr uint32_t kZeros = ~0u;
  __device__ void find_rows(const Tile& t) {
    const int32_t* source = g_.a.source + t.begin + t.row;
    const auto stride = static_cast<uint32_t>(g_.a.stride / 8);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int row = thread_ / 8 + kApart * i;
      const int32_t from = row < t.live ? source[row] : -1;
      rows_[i] = from >= 0 && from < g_.a.sources ? from * stride : kZeros;
    }
  }
  __device__ void gather(int step) {
    const int piece = thread_ % 8, column = step * kDepth + piece * 8, row = thread_ / 8;
    const char* data = static_cast<const char*>(g_.a.data) + column * 2;
    const uint32_t to = ring_.a() + row * 128 + (piece ^ row % 8) * 16;
    const int bytes = min(max((static_cast<int>(g_.k) - column) * 2, 0), 16);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const bool live = rows_[i] != kZeros;
      copy_16(to + i * kApart * 128, data + (live ? rows_[i] : 0) * uint64_t{16}, live ? bytes : 0);
    }
  }

  const TileGemm& g_;
  const FusedMaps& maps_;
  Ring<L> ring_;
  int thread_;
  uint32_t rows_[kRowsEach];
};

}  // namespace moiety::gemm::sm90
