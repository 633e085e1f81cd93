// The kernel of grouped_sm90.h.
#pragma once

#include "moiety/gemm/sm90/loader.cuh"
#include "moiety/gemm/sm90/storer.cuh"

namespace moiety::gemm::sm90 {

// The groups that multiply: 64 rows of every tile each.
template <GemmOp kOp, int kColumns, class L>
__device__ void multiply_tiles(const TileGemm& g, const Maps& maps, uint32_t base,
                               const Tile* tiles, int group) {
  constexpr bool kATurned = kOp == GemmOp::kNT, kBTurned = kOp != GemmOp::kTN;
  constexpr int kAStep = kATurned ? 16 * 128 : 32, kBStep = kBTurned ? 16 * 128 : 32;
  Ring<L> ring{base}, last{base};
  Storer<kOp, kColumns, L> storer(g, maps, base, group);
  const auto release = [&] {
    if (threadIdx.x % 32 == 0) barrier_arrive(last.empty());
    last.next();
  };
  for (int n = 0;; ++n) {
    await_stage(ring);
    const Tile t = tiles[n % kTilesAhead];
    if (t.group < 0) return;
    const bool live = t.live > 64 * group;
    if (live) storer.expect(t, group);
    float d[kColumns / 2];
    for (int step = 0; step < t.steps; ++step) {
      if (!L::kGathers && step > 0) await_stage(ring);
      if (live) {
        products_begin();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
          multiply<kATurned, kBTurned>(d, operand(ring.a() + group * kPiece + k * kAStep, kPiece),
                                       operand(ring.b() + k * kBStep, kPiece), step > 0 || k > 0);
        }
        products_commit();
      }
      ring.next();
      if (L::kGathers && step + 1 < t.steps) await_stage(ring);  // while these products run
      if (live) products_wait<1>();
      if (step > 0) release();
    }
    products_wait<0>();
    release();
    if (live) storer.store(t, group, d);
  }
}

template <GemmOp kOp, int kColumns, Gathered kGathered>
__global__ void __launch_bounds__(3 * kWarpGroup, 1)
    grouped_products(const __grid_constant__ Maps maps, const __grid_constant__ TileGemm g) {
  constexpr bool kGathers = kGathered != Gathered::kNone;
  using L = Layout<kOp, kColumns, kGathers>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  auto* tiles = reinterpret_cast<Tile*>(memory + L::kTiles);
  auto* table = reinterpret_cast<GroupTable*>(memory + L::kTable);
  if (threadIdx.x == 0) {
    for (int s = 0; s < L::kStages; ++s) {
      barrier_init(base + L::kBarriers + s * 16, kGathers ? kWarpGroup + 1 : 1);
      barrier_init(base + L::kBarriers + s * 16 + 8, kGroups * kWarpGroup / 32);
    }
    barrier_init_fence();
  }
  if (kOp != GemmOp::kNT) table->fill(g);
  __syncthreads();
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpGroup, 0);
  if (role == kGroups) {
    give_registers<kGathers ? 56 : 40>();
    if (!kGathers && threadIdx.x % kWarpGroup != 0) return;
    Loader<kOp, kColumns, kGathered, L> loader(g, maps, base);
    const TileWalk<kOp, kColumns> walk(g, *table);
    int n = 0;
    for (int64_t index = blockIdx.x;; index += gridDim.x, ++n) {
      const Tile t = walk.at(index);
      if (threadIdx.x % kWarpGroup == 0) tiles[n % kTilesAhead] = t;
      if (t.group < 0) break;
      loader.tile(t);
    }
    loader.end();
  } else {
    take_registers<kGathers ? 224 : 232>();
    multiply_tiles<kOp, kColumns, L>(g, maps, base, tiles, role);
    if (threadIdx.x % kWarpGroup == 0) wait_stores_read<0>();
  }
}

template <GemmOp kOp, int kColumns, Gathered kGathered>
KernelLaunch launch_of() {
  return {{kOp, kColumns, kGathered},
          grouped_products<kOp, kColumns, kGathered>,
          Layout<kOp, kColumns, kGathered != Gathered::kNone>::kBytes};
}

}  // namespace moiety::gemm::sm90
