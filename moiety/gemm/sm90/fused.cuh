// The kernel of fused.h. Two warp groups multiply, as in grouped_sm90.cuh, and hand the rows of a
// tile, rounded, to warps that compute its activation while the next tile is multiplied, or keep them
// and do so themselves (fused_held.cuh).
#pragma once

#include <type_traits>

#include "moiety/gemm/sm90/fused_held.cuh"
#include "moiety/gemm/sm90/grouped_sm90.cuh"

namespace moiety::gemm::sm90 {

template <GemmOp kOp, FusedKind kKind, class L>
__device__ void activate_tiles(const TileGemm& g, const FusedActivation& f, const FusedMaps& maps,
                               uint32_t base, const GroupTable& table) {
  const WalkOf<kOp, L> walk(g, table);
  FusedRows<kOp, kKind, L> rows(f, maps, base);
  for (int64_t index = blockIdx.x / L::kTogether;; index += gridDim.x / L::kTogether) {
    const Tile t = walk.at(index);
    if (t.group < 0) return;
    rows.tile(t);
  }
}

template <GemmOp kOp, class L>
__device__ void activate(const TileGemm& g, const FusedActivation& f, const FusedMaps& maps,
                         uint32_t base, const GroupTable& table) {
  with_kind(f.block.activation,
            [&](auto kind) { activate_tiles<kOp, kind.value, L>(g, f, maps, base, table); });
}

template <GemmOp kOp, class L>
__device__ void multiply_fused(const TileGemm& g, const FusedActivation& f, const FusedMaps& maps,
                               uint32_t base, const Tile* tiles, int group) {
  if constexpr (L::kHolds) {
    with_kind(f.block.activation, [&](auto kind) {
      if constexpr (kind.value != FusedKind::kSquaredRelu) {
        HeldRows<kind.value, L> results(g, maps, f.block, base, group);
        multiply_tiles<kOp, L>(base, tiles, group, results);
        results.end();
      }
    });
  } else {
    HandedRows<kOp, L> results(g, f.block, base, group);
    multiply_tiles<kOp, L>(base, tiles, group, results);
  }
}

template <GemmOp kOp, class L>
__device__ void prepare_fused(const TileGemm& g, uint32_t base, GroupTable& table) {
  if (threadIdx.x == 0) {
    init_stages<L>(base);
    if constexpr (!L::kHolds) {
      for (int i = 0; i < 2 * L::kBlocks; ++i) barrier_init(base + L::kHanded + i * 8, 1);
      for (int i = 0; i < L::kWriters * L::kSlots; ++i) barrier_init(base + L::kCome + i * 8, 1);
    }
    barrier_init_fence();
  }
  fill_table<kOp, L>(table, g);
  __syncthreads();
  if constexpr (L::kInPairs) cluster_meet();
}

template <GemmOp kOp, class L>
__device__ __forceinline__ void run_block(const FusedMaps& maps, const TileGemm& g,
                                          const FusedActivation& f) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  auto* tiles = reinterpret_cast<Tile*>(memory + L::kTiles);
  auto* table = reinterpret_cast<GroupTable*>(memory + L::kTable);
  prepare_fused<kOp, L>(g, base, *table);
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpGroup, 0);
  if (role < kGroups) {
    take_registers<L::kMultiplyRegisters>();
    multiply_fused<kOp, L>(g, f, maps, base, tiles, role);
  } else if (role == kGroups) {
    give_registers<L::kLoadRegisters>();
    const int thread = static_cast<int>(threadIdx.x) % kWarpGroup;
    if (!L::kGathers && thread >= 32) return;
    FusedLoader<kOp, L> loader(g, maps, base);
    load_tiles<kOp, L>(loader, g, tiles, *table, thread == 0);
  } else if constexpr (!L::kHolds) {
    take_registers<L::kWriteRegisters>();
    activate<kOp, L>(g, f, maps, base, *table);
  }
}

template <GemmOp kOp, class L>
__global__ void __launch_bounds__(L::kThreads, 1)
    fused_products(const __grid_constant__ FusedMaps maps, const __grid_constant__ TileGemm g,
                   const __grid_constant__ FusedActivation f) {
  run_block<kOp, L>(maps, g, f);
}
template <GemmOp kOp, class L>
__global__ void __launch_bounds__(L::kThreads, 1) __cluster_dims__(kPair, 1, 1)
    fused_pairs(const __grid_constant__ FusedMaps maps, const __grid_constant__ TileGemm g,
                const __grid_constant__ FusedActivation f) {
  run_block<kOp, L>(maps, g, f);
  __syncwarp();
  cluster_meet();  // the other block's loads arrive in this one
}

template <GemmOp kOp, int kColumns, bool kGathers, bool kPairs>
FusedLaunch fused_launch_of() {
  using L = std::conditional_t<kColumns == kHeldColumns, HeldLayout<kGathers, kPairs>,
                               FusedLayout<kOp, kColumns, kGathers, kPairs>>;
  if constexpr (kPairs) {
    return {fused_pairs<kOp, L>, L::kThreads, L::kBytes};
  } else {
    return {fused_products<kOp, L>, L::kThreads, L::kBytes};
  }
}
template <GemmOp kOp, int kColumns, bool kGathers>
FusedLaunch fused_launch_of([[maybe_unused]] bool pairs) {
  constexpr bool kHolds = kColumns == kHeldColumns;
  if constexpr (kHolds && !kGathers) {
    return fused_launch_of<kOp, kColumns, kGathers, true>();
  } else {
    if constexpr (kHolds || (!kGathers && kColumns > 128)) {
      if (pairs) return fused_launch_of<kOp, kColumns, kGathers, true>();
    }
    return fused_launch_of<kOp, kColumns, kGathers, false>();
  }
}

// By the columns of a tile.
template <GemmOp kOp, bool kGathers>
FusedLaunch fused_launch_of(const FusedKernel& kernel) {
  if constexpr (kOp == GemmOp::kTN) {
    if (kernel.columns == kHeldColumns) {
      return fused_launch_of<kOp, kHeldColumns, kGathers>(kernel.pairs);
    }
  }
  return kernel.columns == 192 ? fused_launch_of<kOp, 192, kGathers>(kernel.pairs)
                               : fused_launch_of<kOp, 128, kGathers>(kernel.pairs);
}

}  // namespace moiety::gemm::sm90
