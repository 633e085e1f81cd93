// Weight gradients by two warp groups that multiply in turns, each all rows of a tile of its own, so
// that what one does with its tile runs beside the products of the other. For matrices of many tiles;
// short ones are better off with wider tiles.
#pragma once

#include "moiety/gemm/sm90/grouped_sm90.cuh"

namespace moiety::gemm::sm90 {

// Shared memory of grouped_sm90.h's kernel, and a barrier for each group: whether it is its turn.
struct WgradTurns : Layout<GemmOp::kNT, 192, Gathered::kNone> {
  using Base = Layout<GemmOp::kNT, 192, Gathered::kNone>;
  static constexpr int kReadAhead = 0;  // nothing is added to fp32
  static constexpr int kTurns = (Base::kBytes + 7) / 8 * 8;
  static constexpr int kBytes = kTurns + kGroups * 8;
};

struct TurnsMultiplier {
  using L = WgradTurns;
  static constexpr GemmOp kOp = GemmOp::kNT;

  __device__ static void run(const Maps& maps, const TileGemm& g, uint32_t base, const Tile* tiles,
                             int group) {
    Storer<kOp, L::kColumns, L> results(g, maps, base, group);
    // All warps of a group pass the turn, so that none is a turn late.
    const auto passed = [&] {
      if (threadIdx.x % 32 == 0) barrier_arrive(turn_barrier<L>(base, 1 - group));
    };
    Ring<L> ring{base};
    int phase = 0;
    for (int n = group;; n += kGroups) {
      if (n > 0) {
        barrier_wait(turn_barrier<L>(base, group), phase);
        phase ^= 1;
        const Tile& others = tiles[(n - 1) % kTilesAhead];
        if (others.group < 0) break;
        ring.skip(others.steps);
      }
      await_stage(ring);
      const Tile& t = tiles[n % kTilesAhead];
      if (t.group < 0) {
        passed();
        break;
      }
      // The first product overwrites them, but the compiler would hold old ones in registers for it.
      float d[2][L::kColumns / 2] = {};
      if (t.live > 64) {
        multiply<2>(d, ring, t.steps, passed);
        results.store(Tile(t), 0, d[0]);
        results.store(Tile(t), 1, d[1]);
      } else {
        multiply<1>(d, ring, t.steps, passed);
        results.store(Tile(t), 0, d[0]);
      }
    }
    results.end();
  }

 private:
  // The products of a tile, of whose rows there are `kHalves` times 64. `passed` is called when no
  // more will be begun.
  template <int kHalves, class Passed>
  __device__ __forceinline__ static void multiply(float (&d)[2][L::kColumns / 2], Ring<L>& ring,
                                                  int steps, Passed&& passed) {
    Ring<L> last = ring;
    for (int step = 0; step < steps; ++step) {
      await_stage(ring);
      products_begin();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          multiply_sixteen<kOp, L>(d[half], ring.a() + half * kPiece, ring.b(), k,
                                   step > 0 || k > 0);
        }
      }
      products_commit();
      if (step == steps - 1) passed();
      products_wait<1>();
      ring.next();
      if (step > 0) release_stage(last);
    }
    products_wait<0>();
    release_stage(last);
  }
};

__global__ void __launch_bounds__(WgradTurns::kThreads, 1)
    grouped_wgrad_turns(const __grid_constant__ Maps maps, const __grid_constant__ TileGemm g) {
  run_products<GemmOp::kNT, Gathered::kNone, WgradTurns, TurnsMultiplier>(maps, g);
}

}  // namespace moiety::gemm::sm90
