// The warp of fused.cuh that fills the ring of stages, and its shared memory.
#pragma once

#include "moiety/gemm/sm90/fused.h"
#include "moiety/gemm/sm90/stages.cuh"

namespace moiety::gemm::sm90 {

// Stages, buffers through which a group stores (as in stages.cuh), barriers of the stages, tiles, the
// table, and a pair of barriers for each group that multiplies: its rows of a tile are stored, and
// are taken.
template <GemmOp kOp, bool kGathers>
struct FusedLayout {
  static constexpr int kTilesAhead = 16;  // more than the loading warp can be ahead of all others
  static constexpr int kStages = kGathers ? 4 : 3;
  static constexpr int kBuffers = kGathers ? 2 : 4;  // of a group
  static constexpr int kRound = kGathers ? 1 : 4;    // of them, stored together
  static constexpr int kArrivals = kGathers ? 33 : 1;  // that fill a stage
  static constexpr int kA = kTileRows * kDepth * 2;
  static constexpr int kB = kFusedColumns * kDepth * 2;
  static constexpr int kStage = kA + kB;
  static constexpr int kStore = kStages * kStage;
  static constexpr int kBarriers = kStore + kGroups * kBuffers * kPiece;
  static constexpr int kHandOver = kBarriers + 2 * kStages * 8;
  static constexpr int kTiles = kHandOver + kGroups * 2 * 8;
  static constexpr int kTable = kTiles + kTilesAhead * static_cast<int>(sizeof(Tile));
  static constexpr int kBytes = kTable + static_cast<int>(sizeof(GroupTable));
  static_assert(kBytes <= 227 * 1024);
};

template <GemmOp kOp, bool kGathers>
class FusedLoader {
 public:
  using L = FusedLayout<kOp, kGathers>;

  __device__ FusedLoader(const TileGemm& g, const FusedMaps& maps, uint32_t base)
      : g_(g), maps_(maps), ring_{base}, lane_(threadIdx.x % 32) {}

  __device__ void tile(const Tile& t) {
    if constexpr (kGathers) find_rows(t);
    for (int step = 0; step < t.steps; ++step) {
      barrier_wait(ring_.empty(), ring_.phase ^ 1);
      if (lane_ == 0) copy_tiles(t, step);
      if constexpr (kGathers) {
        gather(step);
        arrive_with_copies(ring_.full());
      }
      ring_.next();
    }
  }
  // Announces that no tile follows.
  __device__ void end() {
    if (kGathers) wait_copies();
    barrier_wait(ring_.empty(), ring_.phase ^ 1);
    if (kGathers) barrier_arrive(ring_.full());
    if (lane_ == 0) barrier_arrive(ring_.full());
  }

 private:
  // The operands that the copy engine brings.
  __device__ void copy_tiles(const Tile& t, int step) {
    barrier_arrive_expecting(ring_.full(), (kGathers ? 0 : L::kA) + L::kB);
    const int k = step * kDepth;
    if constexpr (!kGathers) {
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
      for (int j = 0; j < kFusedColumns; j += 64) {
        load_tile(ring_.b() + j / 64 * kPiece, maps_.products.b, ring_.full(),
                  matrix_place(g_, maps_.products.matrices, t.group, t.column + j, k));
      }
    }
  }
  // The row of the weight that half of a tile's columns begins with.
  __device__ int weight_row(const Tile& t, int half) const {
    return maps_.pairs > 0 ? t.column / 2 + half * maps_.pairs
                           : t.column + half * (kFusedColumns / 2);
  }

  // ---- Gathered rows: a lane copies pieces of 16 bytes at one place of rows 4 apart.
  static constexpr int kApart = 32 / 8, kRowsEach = kTileRows / kApart;
  // Where a row begins, in units of 16 bytes, or that it is a row of zeros, of which nothing is
  // read.
  static constexpr uint32_t kZeros = ~0u;
  __device__ void find_rows(const Tile& t) {
    const int32_t* source = g_.a.source + t.begin + t.row;
    const auto stride = static_cast<uint32_t>(g_.a.stride / 8);
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int row = lane_ / 8 + kApart * i;
      const int32_t from = row < t.live ? source[row] : -1;
      rows_[i] = from >= 0 && from < g_.a.sources ? from * stride : kZeros;
    }
  }
  __device__ void gather(int step) {
    const int piece = lane_ % 8, column = step * kDepth + piece * 8;
    const int bytes = min(max((static_cast<int>(g_.k) - column) * 2, 0), 16);
    const char* data = static_cast<const char*>(g_.a.data) + column * 2;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int row = lane_ / 8 + kApart * i;
      const bool live = rows_[i] != kZeros;
      copy_16(ring_.a() + row * 128 + (piece ^ row % 8) * 16,
              data + (live ? rows_[i] : 0) * uint64_t{16}, live ? bytes : 0);
    }
  }

  const TileGemm& g_;
  const FusedMaps& maps_;
  Ring<L> ring_;
  int lane_;
  uint32_t rows_[kRowsEach];
};

}  // namespace moiety::gemm::sm90
