// The kernel of fused.h. Two warp groups multiply in turns, each all rows of a tile of its own, and
// compute the tile's activation while it is the other's turn; a third group loads.
#pragma once

#include "moiety/gemm/sm90/fused_rows.cuh"
#include "moiety/gemm/sm90/turns.cuh"

namespace moiety::gemm::sm90 {

template <GemmOp kOp, FusedKind kKind, class L>
__device__ void multiply_in_turns(const TileGemm& g, const FusedActivation& f, uint32_t base,
                                  const GroupTable& table, int group) {
  const TileWalk<kOp, L::kColumns> walk(g, table);
  const FusedRows<kOp, kKind, L> rows(g, f, base);
  const uint32_t turns = base + L::kTurns;
  const int steps = pieces(g.k, kDepth);
  Ring<L> ring{base};
  int phase = 0;
  if (group == 1) ring.skip(steps);
  for (int64_t n = group;; n += kGroups) {
    const Tile t = walk.at(blockIdx.x + n * gridDim.x);
    if (t.group < 0) return;
    rows.expect(t);
    if (n > 0) {
      barrier_wait(turn_barrier(turns, group), phase);
      phase ^= 1;
    }
    const auto passed = [&] {
      if (threadIdx.x % kWarpGroup == 0) barrier_arrive(turn_barrier(turns, 1 - group));
    };
    // The first product overwrites them, but the compiler would hold old ones in registers for it.
    float d[2][L::kColumns / 2] = {};
    if (t.live > 64) {
      multiply_tile<kOp, 2, L>(d, ring, steps, passed);
      rows.finish(t, 0, d[0]);
      rows.finish(t, 64, d[1]);
    } else {
      multiply_tile<kOp, 1, L>(d, ring, steps, passed);
      rows.finish(t, 0, d[0]);
    }
    ring.skip(steps);
  }
}

template <GemmOp kOp, class L>
__global__ void __launch_bounds__(3 * kWarpGroup, 1)
    fused_products(const __grid_constant__ FusedMaps maps, const __grid_constant__ TileGemm g,
                   const __grid_constant__ FusedActivation f) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  auto* table = reinterpret_cast<GroupTable*>(memory + L::kTable);
  if (threadIdx.x == 0) {
    for (int s = 0; s < L::kStages; ++s) {
      barrier_init(base + L::kBarriers + s * 16, L::kArrivals);
      barrier_init(base + L::kBarriers + s * 16 + 8, kWarpGroup / 32);
    }
    for (int i = 0; i < kGroups; ++i) barrier_init(turn_barrier(base + L::kTurns, i), 1);
    barrier_init_fence();
  }
  table->fill(g);
  __syncthreads();
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpGroup, 0);
  if (role == kGroups) {
    give_registers<40>();
    if (!L::kGathers && threadIdx.x % kWarpGroup != 0) return;
    FusedLoader<kOp, L> loader(g, maps, base);
    const TileWalk<kOp, L::kColumns> walk(g, *table);
    for (int64_t index = blockIdx.x;; index += gridDim.x) {
      const Tile t = walk.at(index);
      if (t.group < 0) break;
      loader.tile(t);
    }
    if (L::kGathers) wait_copies();
    return;
  }
  take_registers<232>();
  const ActivationBlock& block = f.block;
  const bool plain = block.activation.alpha == 1 && block.activation.offset == 0 &&
                     block.activation.limit == swiglu().limit;
  if (block.activation.kind == ActivationKind::kSquaredRelu) {
    multiply_in_turns<kOp, FusedKind::kSquaredRelu, L>(g, f, base, *table, role);
  } else if (plain) {
    multiply_in_turns<kOp, FusedKind::kSwiglu, L>(g, f, base, *table, role);
  } else {
    multiply_in_turns<kOp, FusedKind::kGlu, L>(g, f, base, *table, role);
  }
}

template <GemmOp kOp, int kColumns, bool kGathers>
FusedLaunch fused_launch_of() {
  using L = FusedLayout<kOp, kColumns, kGathers>;
  return {fused_products<kOp, L>, L::kBytes};
}

}  // namespace moiety::gemm::sm90
