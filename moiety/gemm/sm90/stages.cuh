// Shared memory of the kernel of grouped_sm90.h, and places in its tensor maps.
#pragma once

#include "moiety/gemm/sm90/pairs.cuh"
#include "moiety/gemm/sm90/tensor_map.cuh"
#include "moiety/gemm/sm90/wgmma.cuh"

namespace moiety::gemm::sm90 {

constexpr int kPiece = 64 * 128;  // bytes of 64 rows of 128, the unit of copies
constexpr int kWarpRows = 16;     // of a tile, that a warp multiplies
constexpr int kGroups = 2;        // warp groups that multiply
constexpr int kTilesAhead = 8;    // more than the loading group can be ahead
// Bytes of a block, and those of them that barriers, tiles ahead and the table of groups take at most.
constexpr int kMostShared = 227 * 1024, kSharedRest = 2560;

// Shared memory: stages, and buffers through which a group stores, `kRound` at a time. Products over
// rows store all columns of bfloat16 at once, which hides best; weight gradients and gathered rows
// are better off with a stage more. There are as many stages as fit.
template <GemmOp kOp, int kColumnsOfTile, Gathered kGathered, bool kPairs = false,
          bool kIsTransposed = false>
struct Layout {
  static constexpr bool kTransposed = kIsTransposed;  // Kernel::transposed
  static constexpr bool kGathers = kGathered != Gathered::kNone, kInPairs = kPairs;
  static constexpr int kTogether = kPairs ? kPair : 1;  // blocks
  static constexpr bool kEven = true;                   // TileWalk
  using Rows = WholeTiles;                              // PairWalk
  static constexpr bool kMeets = false;                 // whether blocks may keep step: in_step.cuh
  // Gathering FC1's rows takes more threads than other tiles do. FC2's are better off with registers
  // for products of all columns of a tile, which read less of the shared memory.
  static constexpr bool kManyLoaders = kOp == GemmOp::kNT && kGathered == Gathered::kB;
  static constexpr int kLoaders = kManyLoaders ? 2 * kWarpGroup : kWarpGroup;  // threads
  static constexpr int kThreads = kGroups * kWarpGroup + kLoaders;
  static constexpr int kLoadRegisters = kManyLoaders ? 48 : kGathers ? 56 : 40;
  static constexpr int kMultiplyRegisters = kManyLoaders ? 208 : kGathers ? 224 : 232;
  static constexpr int kTileM = tile_rows(kOp, kGathered);       // rows of a tile
  static constexpr int kArrivals = kGathers ? kLoaders + 1 : 1;  // that fill a stage
  static constexpr int kHalves = kTileM / 128;  // times 64 rows, of a group that multiplies
  static constexpr int kColumns = kColumnsOfTile;
  // Warps store their rows without the others of their group: faster by one to three percent, and as
  // much slower where rows lie in order.
  static constexpr bool kAlone = kGathers && !kTransposed;
  static constexpr bool kStoresAtOnce = kOp != GemmOp::kNT && !kGathers;
  static constexpr int kA = kTileM * kDepth * 2;
  static constexpr int kB = kColumns * kDepth * 2;
  static constexpr int kStage = kA + kB;
  static constexpr int kBuffers = kStoresAtOnce ? 4 : 2;  // of a group
  static constexpr int kRound = kStoresAtOnce ? 4 : 1;
  static constexpr int kStages = (kMostShared - kGroups * kBuffers * kPiece - kSharedRest) / kStage;
  // Pieces of old values of fp32 that a thread reads ahead, each 16 registers.
  static constexpr int kReadAhead = kOp != GemmOp::kNT || kTransposed ? 0 : kGathers ? 2 : 4;
  static constexpr int kStore = kStages * kStage;
  static constexpr int kBarriers = kStore + kGroups * kBuffers * kPiece;
  static constexpr int kTiles = kBarriers + 2 * kStages * 8;
  static constexpr int kTable = kTiles + kTilesAhead * static_cast<int>(sizeof(Tile));
  static constexpr int kBytes = kTable + static_cast<int>(sizeof(GroupTable));
  static_assert(kBytes <= kMostShared);
};

// The place of a ragged matrix's rows from `row` on, of which `rows` exist.
__device__ inline Place ragged_place(int column, int row, int rows) {
  return {column, kRaggedEnd - rows, kRaggedEnd, row + rows};
}

// The place in the matrix of a group.
__device__ inline Place matrix_place(const TileGemm& g, const MatrixPlaces& matrices, int group,
                                     int column, int row) {
  if (!g.indexed) return {column, row, group, 0};
  const int64_t bytes = static_cast<const char*>(g.pointers[group]) - matrices.first;
  return {column, row, static_cast<int32_t>(bytes % kNearBytes / 16),
          static_cast<int32_t>(bytes / kNearBytes)};
}

// The ring of stages as one of its users sees it.
template <class L>
struct Ring {
  uint32_t base;
  int stage = 0, phase = 0;

  __device__ void next() {
    if (++stage == L::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  // Passes stages that another user takes.
  __device__ void skip(int stages) {
    stage += stages;
    phase ^= stage / L::kStages & 1;
    stage %= L::kStages;
  }
  __device__ uint32_t full() const { return base + L::kBarriers + stage * 16; }
  __device__ uint32_t empty() const { return full() + 8; }
  __device__ uint32_t a() const { return base + stage * L::kStage; }
  __device__ uint32_t b() const { return a() + L::kA; }
};

// Tells a group that multiplies that it is its turn: of layouts in which groups take turns.
template <class L>
__device__ __forceinline__ uint32_t turn_barrier(uint32_t base, int group) {
  return base + L::kTurns + group * 8;
}

// The barriers of all stages, by one thread. Where groups take turns, one of them takes a stage, and
// there are the barriers of turns.
template <class L>
__device__ __forceinline__ void init_stages(uint32_t base) {
  constexpr bool kInTurns = requires { L::kTurns; };
  constexpr int kWarps = kWarpGroup / 32, kTakers = kInTurns ? 1 : L::kTogether * kGroups;
  for (int s = 0; s < L::kStages; ++s) {
    barrier_init(base + L::kBarriers + s * 16, L::kArrivals);
    barrier_init(base + L::kBarriers + s * 16 + 8, kTakers * kWarps);
  }
  if constexpr (kInTurns) {
    for (int i = 0; i < kGroups; ++i) barrier_init(turn_barrier<L>(base, i), kWarps);
  }
}

// Brings the matrix's part of a stage of a block of a pair in halves, of its columns, or of the
// reduction: where it is `shared`, this block's one to both, else both. `place(half, j)` is that of
// the half's columns from the j-th of the tile on; a half of columns is one load.
template <GemmOp kOp, class L, class PlaceOf>
__device__ __forceinline__ void load_halves(const Ring<L>& ring, const CUtensorMap& map,
                                            bool shared, PlaceOf&& place) {
  const auto load_half = [&](int half, auto&& load) {
    if constexpr (kOp == GemmOp::kTN) {
      load(ring.b() + half * (L::kB / kPair), place(half, 0));
    } else {
#pragma unroll
      for (int j = 0; j < L::kColumns; j += 64) {
        load(ring.b() + j / 64 * kPiece + half * (kPiece / kPair), place(half, j));
      }
    }
  };
  if (shared) {
    return load_half(cluster_rank(), [&](uint32_t to, const Place& at) {
      load_tile_of_both(to, map, ring.full(), at);
    });
  }
#pragma unroll
  for (int half = 0; half < kPair; ++half) {
    load_half(half, [&](uint32_t to, const Place& at) { load_tile(to, map, ring.full(), at); });
  }
}

// Waits until the stage may be multiplied. Rows that threads have copied need an order of their own.
template <class L>
__device__ __forceinline__ void await_stage(const Ring<L>& ring) {
  barrier_wait(ring.full(), ring.phase);
  if (L::kGathers) fence_for_engines();
}

}  // namespace moiety::gemm::sm90
