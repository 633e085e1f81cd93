// Weight gradients by two warp groups that multiply in turns (turns.cuh): one stores its tile while
// the other multiplies. For matrices of many tiles; short ones are better off with wider tiles.
#pragma once

#include "moiety/gemm/sm90/loader.cuh"
#include "moiety/gemm/sm90/storer.cuh"
#include "moiety/gemm/sm90/turns.cuh"

namespace moiety::gemm::sm90 {

// Shared memory of grouped_sm90.h's kernel, the barriers of turns and where the next turn begins.
struct WgradTurns : Layout<GemmOp::kNT, 192, Gathered::kNone> {
  using Base = Layout<GemmOp::kNT, 192, Gathered::kNone>;
  static constexpr int kReadAhead = 0;  // nothing is added to fp32
  static constexpr int kTurns = (Base::kBytes + 7) / 8 * 8;
  static constexpr int kNextStage = kTurns + kGroups * 8;  // two numbers: stage and phase
  static constexpr int kBytes = kNextStage + 8;
};

__device__ inline void gradients_in_turns(const TileGemm& g, const Maps& maps, uint32_t base,
                                          const Tile* tiles, volatile int* next_stage, int group) {
  using L = WgradTurns;
  constexpr GemmOp kOp = GemmOp::kNT;
  Storer<kOp, L::kColumns, L> storer(g, maps, base, group);
  const uint32_t turns = base + L::kTurns;
  Ring<L> ring{base};
  int phase = 0;
  for (int n = group;; n += kGroups) {
    if (n > 0) {
      barrier_wait(turn_barrier(turns, group), phase);
      phase ^= 1;
      ring.stage = next_stage[0];
      ring.phase = next_stage[1];
    }
    await_stage(ring);
    const Tile& t = tiles[n % kTilesAhead];
    Ring<L> after = ring;
    if (t.group >= 0) after.skip(t.steps);
    // All warps of a group pass the turn, so that none is a turn late.
    const auto passed = [&] {
      if (threadIdx.x % kWarpGroup == 0) {
        next_stage[0] = after.stage;
        next_stage[1] = after.phase;
      }
      if (threadIdx.x % 32 == 0) barrier_arrive(turn_barrier(turns, 1 - group));
    };
    if (t.group < 0) return passed();
    // The first product overwrites them, but the compiler would hold old ones in registers for it.
    float d[2][L::kColumns / 2] = {};
    if (t.live > 64) {
      multiply_tile<kOp, 2, L>(d, ring, t.steps, passed);
      storer.store(Tile(t), 0, d[0]);
      storer.store(Tile(t), 1, d[1]);
    } else {
      multiply_tile<kOp, 1, L>(d, ring, t.steps, passed);
      storer.store(Tile(t), 0, d[0]);
    }
  }
}

__global__ void __launch_bounds__(3 * kWarpGroup, 1)
    grouped_wgrad_turns(const __grid_constant__ Maps maps, const __grid_constant__ TileGemm g) {
  using L = WgradTurns;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  auto* tiles = reinterpret_cast<Tile*>(memory + L::kTiles);
  if (threadIdx.x == 0) {
    for (int s = 0; s < L::kStages; ++s) {
      barrier_init(base + L::kBarriers + s * 16, 1);
      barrier_init(base + L::kBarriers + s * 16 + 8, kWarpGroup / 32);
    }
    for (int i = 0; i < kGroups; ++i) {
      barrier_init(turn_barrier(base + L::kTurns, i), kWarpGroup / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpGroup, 0);
  if (role == kGroups) {
    give_registers<40>();
    if (threadIdx.x % kWarpGroup >= 32) return;
    const bool first = threadIdx.x % kWarpGroup == 0;
    Loader<GemmOp::kNT, L::kColumns, Gathered::kNone, L> loader(g, maps, base);
    const TileWalk<GemmOp::kNT, L::kColumns> walk(
        g, *reinterpret_cast<GroupTable*>(memory + L::kTable));
    int n = 0;
    for (int64_t index = blockIdx.x;; index += gridDim.x, ++n) {
      const Tile t = walk.at(index);
      if (first) tiles[n % kTilesAhead] = t;
      __syncwarp();
      if (t.group >= 0) {
        loader.tile(t, t);
        continue;
      }
      if (first) tiles[(n + 1) % kTilesAhead] = t;  // for the other group
      break;
    }
    loader.end();
  } else {
    take_registers<232>();
    gradients_in_turns(g, maps, base, tiles, reinterpret_cast<int*>(memory + L::kNextStage), role);
    if (threadIdx.x % kWarpGroup == 0) wait_stores_read<0>();
  }
}

}  // namespace moiety::gemm::sm90
