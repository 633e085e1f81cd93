// A forward tile of fused.cuh without warps of their own for activations, and so with 256 columns:
// who multiplies keeps its rows of H, rounded, in registers, and computes their activation beside the
// products of the next tile.
#pragma once

#include "moiety/gemm/sm90/fused_rows.cuh"

namespace moiety::gemm::sm90 {

// The sums of 256 columns and what waits take 192 registers of a thread. Shared memory has stages, and
// two units of each warp that multiplies, of 8 rows of 32 columns of both halves of H and of A.
template <bool kGathersRows, bool kBlocksInPairs>
struct HeldLayout : FusedStages<kHeldColumns, kGathersRows, kBlocksInPairs> {
  using Base = FusedStages<kHeldColumns, kGathersRows, kBlocksInPairs>;
  using Base::kGathers, Base::kStages, Base::kStage;
  static constexpr bool kHolds = true;
  static constexpr int kThreads = (kGroups + 1) * kWarpGroup;
  static constexpr int kMultiplyRegisters = kGathers ? 224 : 232;
  static constexpr int kLoadRegisters = kGathers ? 56 : 40;
  static constexpr int kBox = 8 * 64, kUnit = 3 * kBox, kUnits = 2;  // of a warp
  static constexpr int kStore = kStages * kStage;
  static constexpr int kBarriers = kStore + kGroups * 4 * kUnits * kUnit;
  static constexpr int kTiles = kBarriers + 2 * kStages * 8;
  static constexpr int kTable = kTiles + kTilesAhead * static_cast<int>(sizeof(Tile));
  static constexpr int kBytes = kTable + static_cast<int>(sizeof(GroupTable));
  static_assert(kBytes <= kMostShared);
};

// What a warp that multiplies does with its 16 rows of a tile. What waits leaves in units: the upper 8
// rows of 32 columns of F, the lower ones, those of the next columns. The next unit is always in the
// same registers, into which the others move up, so that a loop serves all.
template <FusedKind kKind, class L>
class HeldRows {
 public:
  static constexpr int kHeld = L::kColumns / 2;      // accumulators of a thread
  static constexpr int kWaiting = L::kColumns / 32;  // units of a tile
  static constexpr int kWords = 4;                   // of each half of H in a unit

  __device__ HeldRows(const TileGemm& g, const FusedMaps& maps, const ActivationBlock& block,
                      uint32_t base, int group)
      : g_(g), maps_(maps), block_(block), lane_(threadIdx.x % 32) {
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) % kWarpGroup / 32, 0);
    first_ = group * 64 + warp * kWarpRows;
    units_ = base + L::kStore + (group * 4 + warp) * (L::kUnits * L::kUnit);
    place_ = lane_ % 8 * 64 + (lane_ / 8 ^ lane_ / 2 % 4) * 16;
  }

  __device__ void expect(const Tile&, int) const {}
  template <int>
  __device__ void store(const Tile& t, int, float (&d)[kHeld]) {
    if (g_.epilogue.bias) {
      add_bias<L::kColumns>(g_, t, static_cast<int>(block_.ffn), true, d);
    }
#pragma unroll
    for (int unit = 0; unit < kWaiting; ++unit) {
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const int i = 4 * (unit / 2 * kWords + j) + unit % 2 * 2;
        gate_[unit * kWords + j] = bf16_word(d[i], d[i + 1]);
        up_[unit * kWords + j] = bf16_word(d[kHeld / 2 + i], d[kHeld / 2 + i + 1]);
      }
    }
    rows_ = t.live - first_;
    row_ = t.begin + t.row + first_;
    column_ = t.column / 2;
    p_ = probability(0);
    other_p_ = probability(8);
    unit_ = 0;
    waits_ = true;
  }

  __device__ bool waits() const { return waits_; }
  __device__ void leave_all() {
    if (!waits_) return;
#pragma unroll 1
    for (int i = 0; i < kWaiting; ++i) leave();
    waits_ = false;
  }
  // Beside `steps` steps of the next tile's products.
  template <class Multiply>
  __device__ __forceinline__ void leave_beside(Multiply&& multiply, int steps) {
    const int apart = steps / kWaiting;
#pragma unroll 1
    for (int i = 0; i < kWaiting; ++i) {
      multiply([&] { leave(); });
#pragma unroll 1
      for (int j = 1; j < apart; ++j) multiply([] {});
    }
    waits_ = false;
  }
  // Waits until all that was stored has left shared memory.
  __device__ void end() const {
    if (elect_one()) wait_stores_read<0>();
  }

 private:
  __device__ float probability(int first) const {
    const int row = first + lane_ / 4;
    if (row >= rows_ || !block_.prob) return 1;
    return static_cast<const float*>(block_.prob)[int64_t{row_} + row];
  }
  __device__ uint32_t activated(uint32_t a, uint32_t b) const {
    const Activation activation = activation_of<kKind>(block_.activation);
    return bf16_word(glu(activation, low_bf16(a), low_bf16(b)) * p_,
                     glu(activation, high_bf16(a), high_bf16(b)) * p_);
  }
  // The next unit.
  __device__ __forceinline__ void leave() {
    const uint32_t to = units_ + unit_ % L::kUnits * L::kUnit;
    uint32_t a[kWords];
#pragma unroll
    for (int j = 0; j < kWords; ++j) a[j] = activated(gate_[j], up_[j]);
    if (elect_one()) wait_stores_read<L::kUnits - 1>();
    __syncwarp();
    store_matrices(to + place_, gate_[0], gate_[1], gate_[2], gate_[3]);
    store_matrices(to + L::kBox + place_, up_[0], up_[1], up_[2], up_[3]);
    store_matrices(to + 2 * L::kBox + place_, a[0], a[1], a[2], a[3]);
    fence_for_engines();
    __syncwarp();
    const int lower = unit_ % 2 * 8;
    if (rows_ > lower && elect_one()) {
      const Place at = ragged_place(column_ + unit_ / 2 * 32, row_ + lower, min(rows_ - lower, 8));
      store_tile(maps_.h[0], to, at);
      store_tile(maps_.h[1], to + L::kBox, at);
      store_tile(maps_.a, to + 2 * L::kBox, at);
      commit_stores();
    }
    __syncwarp();
    ++unit_;
    const float p = p_;
    p_ = other_p_;
    other_p_ = p;
#pragma unroll
    for (int i = 0; i < (kWaiting - 1) * kWords; ++i) {
      gate_[i] = gate_[i + kWords];
      up_[i] = up_[i + kWords];
    }
  }

  const TileGemm& g_;
  const FusedMaps& maps_;
  const ActivationBlock& block_;
  int lane_;
  uint32_t units_, place_;  // in shared memory, and of the lane's row of a matrix in a box
  int first_;               // of the warp's rows of a tile
  // What waits: its first row, column of F, live rows, next unit, and the factors of the lane's rows.
  int row_ = 0, column_ = 0, rows_ = 0, unit_ = 0;
  float p_ = 1, other_p_ = 1;
  bool waits_ = false;
  uint32_t gate_[kWaiting * kWords], up_[kWaiting * kWords];
};

}  // namespace moiety::gemm::sm90
