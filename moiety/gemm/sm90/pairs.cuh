// Tiles of pairs of blocks, clusters of two: the same columns of two neighbouring row tiles of a group,
// so that each block loads half of the matrix's part for both. The last row tile of an odd number of
// them belongs to both, with columns of its own for each.
#pragma once

#include <type_traits>

#include "moiety/gemm/sm90/device.cuh"
#include "moiety/gemm/sm90/tile_walk.cuh"

namespace moiety::gemm::sm90 {

// How a group's rows are dealt out to its tiles: as many as fit, or the rest.
struct WholeTiles {
  __device__ static int tiles_of(int rows) { return pieces(rows, kTileRows); }
  __device__ static int begin(int, int, int tile) { return tile * kTileRows; }
};

// kColumns: of a tile, which has Rows.
template <int kColumns, class Rows>
class PairWalk {
 public:
  __device__ PairWalk(const TileGemm& g, const GroupTable& table)
      : g_(g), table_(table), columns_(pieces(g.n, kColumns)), rank_(cluster_rank()) {}

  // Pairs of tiles of a group's rows.
  __device__ static int tiles_of(int rows, int columns) {
    return pairs_of(Rows::tiles_of(rows), columns);
  }
  // This block's tile of a pair. One that does not exist has no rows that live.
  __device__ Tile at(int64_t index) const {
    Tile t;
    if (index >= table_.before[GroupTable::kChunks]) return t;
    const auto f = table_.find(g_, static_cast<int>(index),
                               [&](int rows) { return tiles_of(rows, columns_); });
    const int tiles = Rows::tiles_of(f.rows), inner = static_cast<int>(index) - f.before;
    const int together = tiles / kPair * columns_;
    t.shared = inner < together;
    int row = tiles - 1, column = (inner - together) * kPair + rank_;
    if (t.shared) {
      const InBands at = in_bands(inner, tiles / kPair, columns_, kBand);
      row = at.row * kPair + rank_;
      column = at.column;
    }
    t.group = f.group;
    t.row = Rows::begin(f.rows, tiles, row);
    t.column = column * kColumns;
    t.live = column < columns_ ? min(f.rows, Rows::begin(f.rows, tiles, row + 1)) - t.row : 0;
    t.begin = f.begin;
    t.depth = static_cast<int>(g_.k);
    t.steps = pieces(g_.k, kDepth);
    return t;
  }

  // Whether all pairs have a tile when this one has the tile at `index`, and had one before.
  __device__ bool all_go_on(int64_t index) const {
    const int pairs = gridDim.x / kPair;
    const int64_t first = index - index % pairs;  // of the tiles at that time
    return first > 0 && first + pairs <= table_.before[GroupTable::kChunks];
  }

 private:
  static constexpr int kBand = 8;

  const TileGemm& g_;
  const GroupTable& table_;
  int columns_, rank_;
};

// The walk of a block, or of a pair of blocks, over its tiles.
template <GemmOp kOp, class L>
using WalkOf = std::conditional_t<L::kInPairs, PairWalk<L::kColumns, typename L::Rows>,
                                  TileWalk<kOp, L::kColumns, L::kTileM, L::kEven>>;

// The table of that walk.
template <GemmOp kOp, class L>
__device__ void fill_table(GroupTable& table, const TileGemm& g) {
  if constexpr (L::kInPairs) {
    const int columns = pieces(g.n, L::kColumns);
    table.fill(g, [&](int rows) { return WalkOf<kOp, L>::tiles_of(rows, columns); });
  } else if constexpr (kOp != GemmOp::kNT) {
    table.fill(g, WalkOf<kOp, L>::tiles_of);
  }
}

}  // namespace moiety::gemm::sm90
