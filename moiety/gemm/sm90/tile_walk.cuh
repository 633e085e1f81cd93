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
  int32_t row, column, live = 0;
  int32_t begin;  // the group's first row in the buffers
  int32_t depth;
  int32_t shared;  // whether the other block of a pair has the same columns (pairs.cuh)
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
  // All threads of the block call it, and meet afterwards. `tiles_of` rows of a group: the tiles that
  // are counted.
  template <class TilesOf>
  __device__ void fill(const TileGemm& g, TilesOf&& tiles_of) {
    const int groups = static_cast<int>(g.groups.groups), size = chunk(g);
    for (int i = threadIdx.x; i < kChunks; i += blockDim.x) {
      int tiles = 0;
      for (int e = i * size; e < min((i + 1) * size, groups); ++e) {
        tiles += tiles_of(claimed_rows(g, e));
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
  // The group of a tile, which exists, and the tiles before that group.
  struct Found {
    int group, before, begin, rows;
  };
  template <class TilesOf>
  __device__ Found find(const TileGemm& g, int tile, TilesOf&& tiles_of) const {
    int low = 0;
    for (int half = kChunks / 2; half > 0; half /= 2) {
      if (before[low + half] <= tile) low += half;
    }
    const int size = chunk(g);
    Found f{low * size, before[low], 0, 0};
    quant::Claim c = claim(g.groups, f.group);
    f.rows = c.valid ? static_cast<int>(c.rows) : 0;
    while (size > 1 && f.before + tiles_of(f.rows) <= tile) {
      f.before += tiles_of(f.rows);
      c = claim(g.groups, ++f.group);
      f.rows = c.valid ? static_cast<int>(c.rows) : 0;
    }
    f.begin = static_cast<int>(c.begin);
    return f;
  }
};

// The place of a tile among `rows` by `columns` of them, by bands of `band` rows, which share columns,
// so that the part of `b` that they read is read from the cache.
struct InBands {
  int row, column;
};
__device__ inline InBands in_bands(int index, int rows, int columns, int band_rows) {
  const int band = index / (band_rows * columns), inner = index - band * band_rows * columns;
  const int height = min(band_rows, rows - band * band_rows), column = inner / height;
  return {band * band_rows + inner - column * height, column};
}

// kEven: a group's rows are dealt out evenly to its tiles where the reduction is long. A last tile of
// few rows would be done early, and its block ahead of those that read the same operands from then on.
template <GemmOp kOp, int kColumns, int kRows = kTileRows, bool kEven = false>
class TileWalk {
 public:
  __device__ TileWalk(const TileGemm& g, const GroupTable& table)
      : g_(g), table_(table), columns_(pieces(g.n, kColumns)) {}

  // Of a group's rows.
  __device__ static int tiles_of(int rows) { return pieces(rows, kTileRows); }
  __device__ Tile at(int64_t index) const {
    return kOp == GemmOp::kNT ? of_matrix(index) : of_rows(index);
  }

 private:
  static constexpr int kBand = 16;
  // From where on rows are dealt out evenly: elements of the reduction, and tiles, since a second tile
  // of few rows is a third of the work.
  static constexpr int64_t kEvenDepth = 1536;
  static constexpr int kEvenTiles = 3;

  // `rows`: of tiles, each of `height` rows, in bands of `band` of them.
  __device__ void place(Tile& t, int index, int rows, int height, int band) const {
    const InBands at = in_bands(index, rows, columns_, band);
    t.row = at.row * height;
    t.column = at.column * kColumns;
  }

  __device__ Tile of_matrix(int64_t index) const {
    Tile t;
    const int rows = pieces(g_.m, kRows), tiles = rows * columns_;
    if (index >= g_.groups.groups * tiles) return t;
    t.group = static_cast<int>(index / tiles);
    place(t, static_cast<int>(index - int64_t{t.group} * tiles), rows, kRows, kBand);
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
    const auto f = table_.find(g_, static_cast<int>(index / columns_), tiles_of);
    const int tiles = tiles_of(f.rows);
    int height = kTileRows, band = kBand;
    if (kEven && g_.k >= kEvenDepth && tiles >= kEvenTiles) {
      height = pieces(f.rows, tiles);
      band = pieces(tiles, max((tiles + kBand / 2) / kBand, 1));
    }
    t.group = f.group;
    place(t, static_cast<int>(index - int64_t{f.before} * columns_), tiles, height, band);
    t.live = min(f.rows - t.row, height);
    t.begin = f.begin;
    t.depth = static_cast<int>(g_.k);
    t.steps = pieces(g_.k, kDepth);
    return t;
  }

  const TileGemm& g_;
  const GroupTable& table_;
  int columns_;
};

}  // namespace moiety::gemm::sm90
