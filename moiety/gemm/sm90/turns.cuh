// Two warp groups that multiply in turns, each all rows of a tile of its own, so that what one does
// with its tile runs beside the products of the other.
#pragma once

#include "moiety/gemm/sm90/stages.cuh"

namespace moiety::gemm::sm90 {

// Whose turn it is: the other group has asked for the last stage of the tile before.
__device__ __forceinline__ uint32_t turn_barrier(uint32_t first, int group) {
  return first + group * 8;
}

// The products of a tile, of whose rows there are `kHalves` times 64. `passed` is called when no
// more will be begun.
template <GemmOp kOp, int kHalves, class L, class Passed>
__device__ __forceinline__ void multiply_tile(float (&d)[2][L::kColumns / 2], Ring<L>& ring,
                                              int steps, Passed&& passed) {
  constexpr bool kATurned = kOp == GemmOp::kNT, kBTurned = kOp != GemmOp::kTN;
  constexpr int kAStep = kATurned ? 16 * 128 : 32, kBStep = kBTurned ? 16 * 128 : 32;
  Ring<L> last = ring;
  const auto release = [&] {
    if (threadIdx.x % 32 == 0) barrier_arrive(last.empty());
    last.next();
  };
  for (int step = 0; step < steps; ++step) {
    await_stage(ring);
    products_begin();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        multiply<kATurned, kBTurned>(d[half], operand(ring.a(), kPiece, half * kPiece + k * kAStep),
                                     operand(ring.b(), kPiece, k * kBStep), step > 0 || k > 0);
      }
    }
    products_commit();
    if (step == steps - 1) passed();
    products_wait<1>();
    ring.next();
    if (step > 0) release();
  }
  products_wait<0>();
  release();
}

}  // namespace moiety::gemm::sm90
