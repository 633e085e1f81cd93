// The tiles of a grouped product, from the sizes of groups in the GPU's memory.
#pragma once

#include "moiety/gemm/sm90/grouped_sm90.h"
#include "moiety/gemm/sm90/launch.cuh"

namespace moiety::gemm::sm90 {

constexpr int kDepth = 64;  // of the reduction, in a step: 128 bytes

// A tile: rows from `row` on of a group, `live` of which exist, and columns from `column` on. For
// kNT these are rows and columns of the group's matrix, and `depth` is the group's size.
struct Tile {
  int32_t group = -1;  // counted from groups.first; -1: there is none
  int32_t steps;       // of the reduction
  int32_t row, column, live;
  int32_t begin;  // the group's first row in the buffers
  int32_t depth;
  int32_t unused;  // makes it 32 bytes
};

__device__ inline int claimed_rows(const TileGemm& g, int group) {
  const quant::Claim c = claim(g.groups, group);
  return c.valid ? static_cast<int>(c.rows) : 0;
}
__device__ inline int pieces(int64_t n, int size) {
  return static_cast<int>((n + size - 1) / size);
}

// The row tiles before each chunk of groups, in shared memory, so that no tile asks all groups.
struct GroupTable {
  static constexpr int kChunks = 512;
  int32_t before[kChunks + 1];

  __device__ static int chunk(const TileGemm& g) {
    return max(pieces(g.groups.groups, kChunks), 1);
  }
  // All threads of the block call it, and meet afterwards.
  __device__ void fill(const TileGemm& g) {
    const int groups = static_cast<int>(g.groups.groups), size = chunk(g);
    for (int i = threadIdx.x; i < kChunks; i += blockDim.x) {
      int tiles = 0;
      for (int e = i * size; e < min((i + 1) * size, groups); ++e) {
        tiles += pieces(claimed_rows(g, e), kTileRows);
      }
      before[i + 1] = tiles;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    constexpr int kEach = kChunks / 32;
    int sum = 0, own[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) own[i] = sum += before[1 + threadIdx.x * kEach + i];
    int first = sum;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int more = __shfl_up_sync(~0u, first, distance);
      if (static_cast<int>(threadIdx.x) >= distance) first += more;
    }
    first -= sum;
    if (threadIdx.x == 0) before[0] = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) before[1 + threadIdx.x * kEach + i] = first + own[i];
  }
};

template <GemmOp kOp, int kColumns, int kRows = kTileRows>
class TileWalk {
 public:
  __device__ TileWalk(const TileGemm& g, const GroupTable& table)
      : g_(g), table_(table), columns_(pieces(g.n, kColumns)), chunk_(GroupTable::chunk(g)) {}

  __device__ Tile at(int64_t index) const {
    return kOp == GemmOp::kNT ? of_matrix(index) : of_rows(index);
  }

 private:
  // Row tiles that share columns, so that the part of `b` that they read is read from the cache.
  static constexpr int kBand = 16;

  __device__ void place(Tile& t, int index, int rows) const {
    const int band = index / (kBand * columns_), inner = index - band * kBand * columns_;
    const int height = min(kBand, rows - band * kBand), column = inner / height;
    t.row = (band * kBand + inner - column * height) * kRows;
    t.column = column * kColumns;
  }

  __device__ Tile of_matrix(int64_t index) const {
    Tile t;
    const int rows = pieces(g_.m, kRows), tiles = rows * columns_;
    if (index >= g_.groups.groups * tiles) return t;
    t.group = static_cast<int>(index / tiles);
    place(t, static_cast<int>(index - int64_t{t.group} * tiles), rows);
    t.live = min(static_cast<int>(g_.m) - t.row, kRows);
    const quant::Claim c = claim(g_.groups, t.group);
    t.begin = c.valid ? static_cast<int>(c.begin) : 0;
    t.depth = c.valid ? static_cast<int>(c.rows) : 0;
    t.steps = max(pieces(t.depth, kDepth), 1);  // a group without rows is a product of zeros
    return t;
  }

  __device__ Tile of_rows(int64_t index) const {
    Tile t;
    if (index >= int64_t{table_.before[GroupTable::kChunks]} * columns_) return t;
    const int above = static_cast<int>(index / columns_);  // row tiles of other groups at most
    int low = 0;
    for (int half = GroupTable::kChunks / 2; half > 0; half /= 2) {
      if (table_.before[low + half] <= above) low += half;
    }
    int before = table_.before[low], group = low * chunk_;
    quant::Claim c = claim(g_.groups, group);
    int rows = c.valid ? static_cast<int>(c.rows) : 0;
    while (chunk_ > 1 && before + pieces(rows, kTileRows) <= above) {
      before += pieces(rows, kTileRows);
      c = claim(g_.groups, ++group);
      rows = c.valid ? static_cast<int>(c.rows) : 0;
    }
    t.group = group;
    place(t, static_cast<int>(index - int64_t{before} * columns_), pieces(rows, kTileRows));
    t.live = min(rows - t.row, kTileRows);
    t.begin = static_cast<int>(c.begin);
    t.depth = static_cast<int>(g_.k);
    t.steps = pieces(g_.k, kDepth);
    return t;
  }

  const TileGemm& g_;
  const GroupTable& table_;
  int columns_, chunk_;
};

}  // namespace moiety::gemm::sm90
