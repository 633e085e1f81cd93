// Products of rows, by pairs of blocks, with operands exchanged: each group that multiplies has 128 of
// the tile's 256 columns as rows of its products, and the tile's rows as their columns, of which there
// may be any multiple of 8 up to kExchangedRows. Where groups have few rows that is better than tiles
// of 128 rows, the last of which are half empty on average.
#pragma once

#include "moiety/gemm/sm90/grouped_sm90.cuh"

namespace moiety::gemm::sm90 {

// Tiles of equally many rows, a multiple of 8, but for the last: its block waits for that of the tile
// before it, so that all pairs of a group take the same time. Tiles of, say, 128 or 136 rows do not, and
// pairs drift apart until they read nothing together.
struct EvenEights {
  __device__ static int tiles_of(int rows) { return pieces(rows, kExchangedRows); }
  __device__ static int begin(int rows, int tiles, int tile) {
    return tile * (pieces(pieces(rows, tiles), 8) * 8);
  }
};

template <GemmOp kOp, Gathered kGathered>
struct ExchangedLayout : Layout<kOp, 256, kGathered, true> {
  using Base = Layout<kOp, 256, kGathered, true>;
  using Rows = EvenEights;
  static constexpr bool kMeets = !Base::kGathers;
  static constexpr int kTileM = kExchangedRows;
  static constexpr int kLoadRegisters = 56, kMultiplyRegisters = 224;
  static constexpr int kHalves = 2;  // times 64 columns, of a group that multiplies
  static constexpr int kA = kTileM * kDepth * 2;
  static constexpr int kStage = kA + Base::kB;
  static constexpr int kStages = 4;
  static constexpr int kBuffers = 2;  // of a group
  static constexpr int kBuffer = kExchangedBox * 128;
  static constexpr int kStore = kStages * kStage;
  static constexpr int kBarriers = kStore + kGroups * kBuffers * kBuffer;
  static constexpr int kTiles = kBarriers + 2 * kStages * 8;
  static constexpr int kTable = kTiles + kTilesAhead * static_cast<int>(sizeof(Tile));
  static constexpr int kBytes = kTable + static_cast<int>(sizeof(GroupTable));
  static_assert(kBytes <= kMostShared);
};

// The results of a group, twice 64 columns of the tile, which leave in boxes of kExchangedBox rows. Those
// that find no free buffer wait in registers, rounded, until the next tile is multiplied; kernels that
// gather have no registers for it.
template <GemmOp kOp, class L>
class ExchangedStorer {
 public:
  static constexpr int kHeld = L::kTileM / 2;  // sums of a thread for 64 columns
  using Sums = float[L::kHalves][kHeld];
  static constexpr int kBoxes = (L::kTileM + kExchangedBox - 1) / kExchangedBox;  // of 64 columns
  static constexpr int kWaiting = L::kGathers ? 0 : L::kHalves * kBoxes - L::kBuffers;

  __device__ ExchangedStorer(const TileGemm& g, const Maps& maps, uint32_t base, int group)
      : g_(g),
        maps_(maps),
        e_(g.epilogue),
        buffers_(base + L::kStore + group * L::kBuffers * L::kBuffer),
        group_(group),
        warp_(__shfl_sync(~0u, threadIdx.x % kWarpGroup / 32, 0)),
        lane_(threadIdx.x % 32) {}

  // The boxes of the tile before have left. The sums are not changed: the compiler takes registers that
  // other instructions write for products that must not overlap.
  __device__ __forceinline__ void store(const Tile& t, const Sums& d) {
    const int64_t group = g_.groups.first + t.group;
    const float a_scale = e_.a_scale.of(group), b_scale = e_.b_scale.of(group);
    const float alpha = e_.alpha.of(group);
    const bool scaled = a_scale != 1 || b_scale != 1 || alpha != 1;
    column_ = t.column + group_ * L::kHalves * 64;
    row_ = t.begin + t.row;
    live_ = t.live;
#pragma unroll
    for (int box = 0; box < L::kHalves * kBoxes; ++box) {
      const float* sums = d[box / kBoxes];
      const int first = first_row(box) / 2;
      float v[2 * kWords];
#pragma unroll
      for (int i = 0; i < 2 * kWords; ++i) v[i] = first + i < kHeld ? sums[first + i] : 0;
      if (scaled) {
#pragma unroll
        for (float& x : v) x = __fmul_rn(__fmul_rn(__fmul_rn(x, a_scale), b_scale), alpha);
      }
      if (kOp == GemmOp::kTN && e_.bias) add_bias(box, v, group);
      uint32_t words[kWords];
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = bf16_word(v[2 * i], v[2 * i + 1]);
      if (box < kNow) {
        store_box(box, words);
      } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) words_[box - kNow][i] = words[i];
      }
    }
  }
  // Those that wait.
  template <int kBox = 0>
  __device__ __forceinline__ void leave_all() {
    if constexpr (kBox < kWaiting) {
      store_box(kNow + kBox, words_[kBox]);
      leave_all<kBox + 1>();
    }
  }
  // The same, each beside a step of the next tile's products.
  template <int kBox = 0, class Multiply>
  __device__ __forceinline__ void leave_beside(Multiply&& multiply) {
    if constexpr (kBox < kWaiting) {
      multiply([&] { store_box(kNow + kBox, words_[kBox]); });
      leave_beside<kBox + 1>(multiply);
    }
  }
  // Sends those that wait, and waits until all have left shared memory.
  __device__ void end() {
    leave_all();
    if (sends()) wait_stores_read<0>();
  }

 private:
  static constexpr int kWords = kExchangedBox / 4;  // of a box, a thread's
  static constexpr int kNow = L::kHalves * kBoxes - kWaiting;
  __device__ bool sends() const { return threadIdx.x % kWarpGroup == 0; }
  __device__ static constexpr int first_row(int box) { return box % kBoxes * kExchangedBox; }
  __device__ int first_column(int box) const { return column_ + box / kBoxes * 64; }
  // kExchangedBox rows of 64 columns, or as many as the tile has.
  __device__ __forceinline__ void store_box(int box, const uint32_t (&words)[kWords]) {
    const int row = first_row(box);
    if (row >= live_) return;
    const uint32_t to = buffers_ + buffer_ * L::kBuffer;
    buffer_ = (buffer_ + 1) % L::kBuffers;
    if (sends()) wait_stores_read<L::kBuffers - 1>();
    meet(1 + group_, kWarpGroup);
    write_transposed_box<kExchangedBox / 8>(to, words, warp_, lane_);
    fence_for_engines();
    meet(1 + group_, kWarpGroup);
    if (!sends()) return;
    store_tile(maps_.out, to, ragged_place(first_column(box), row_ + row, live_ - row));
    commit_stores();
  }
  __device__ void add_bias(int box, float (&v)[2 * kWords], int64_t group) const {
    const auto* scales = static_cast<const float*>(e_.bias_scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = first_column(box) + 16 * warp_ + 8 * half + lane_ / 4;
      const float bias = at < g_.n ? read_element(e_.bias, e_.bias_dtype, group * g_.n + at) : 0;
#pragma unroll
      for (int j = 0; j < kExchangedBox / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = first_row(box) + 8 * j + lane_ % 4 * 2 + i;
          const float scale = scales && row < live_ ? scales[row_ + row] : 1;
          float& x = v[4 * j + 2 * half + i];
          x = fmaf(bias, scale, x);
        }
      }
    }
  }

  const TileGemm& g_;
  const Maps& maps_;
  const Epilogue& e_;
  uint32_t buffers_;
  int group_, warp_, lane_, buffer_ = 0;
  int column_ = 0, row_ = 0, live_ = 0;                  // of the tile that is stored
  uint32_t words_[kWaiting > 0 ? kWaiting : 1][kWords];  // that wait
};

// Calls run(n) for a number n of columns, a constant, that a product has and that is not less.
template <class Run>
__device__ __forceinline__ void with_columns(int live, Run&& run) {
  const auto of = [&]<int kColumns>() { run(std::integral_constant<int, kColumns>()); };
  if (live <= 32) return of.template operator()<32>();
  if (live <= 64) return of.template operator()<64>();
  switch (pieces(live, 8)) {
    default:
      return of.template operator()<96>();
    case 13:
      return of.template operator()<104>();
    case 14:
      return of.template operator()<112>();
    case 15:
      return of.template operator()<120>();
    case 16:
      return of.template operator()<128>();
    case 17:
      return of.template operator()<136>();
  }
}

template <GemmOp kOp, class L>
struct ExchangedMultiplier {
  // Part of its kernel, since products may not run across a function's end.
  __device__ __forceinline__ static void run(const Maps& maps, const TileGemm& g, uint32_t base,
                                             const Tile* tiles, int group) {
    constexpr bool kTurned = kOp == GemmOp::kNN;  // the matrix
    constexpr int kStep = kTurned ? 16 * 128 : 32;
    ExchangedStorer<kOp, L> results(g, maps, base, group);
    Ring<L> ring{base}, last{base};
    typename ExchangedStorer<kOp, L>::Sums d = {};  // a product writes as many as it has columns
    for (int n = 0;; ++n) {
      await_stage(ring);
      const Tile t = read_tile<L>(tiles, n);
      if (t.group < 0) break;
      const bool beside = t.steps >= results.kWaiting;
      if (!beside) results.leave_all();
      with_columns(t.live, [&](auto columns) {
        int step = 0;
        // The products of a step, and what is done beside them.
        const auto multiply = [&](auto&& other) {
          if (!L::kGathers && step > 0) await_stage(ring);
          products_begin();
#pragma unroll
          for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
            for (int half = 0; half < L::kHalves; ++half) {
              const uint32_t part = ring.b() + (L::kHalves * group + half) * kPiece;
              Wgmma<columns.value>::template run<kTurned, false>(
                  d[half], operand(part, kPiece, k * kStep), operand(ring.a(), kPiece, k * 32),
                  step > 0 || k > 0);
            }
          }
          products_commit();
          ring.next();
          other();
          if (L::kGathers && step + 1 < t.steps) await_stage(ring);  // while these products run
          products_wait<1>();
          if (step > 0) release_stage(last);
          ++step;
        };
        if (beside) results.leave_beside(multiply);
        while (step < t.steps) multiply([] {});
        products_wait<0>();
      });
      release_stage(last);
      results.store(t, d);
    }
    results.end();
  }
};

template <GemmOp kOp, Gathered kGathered>
__global__ void __launch_bounds__(ExchangedLayout<kOp, kGathered>::kThreads, 1)
    __cluster_dims__(kPair, 1, 1)
        grouped_exchanged(const __grid_constant__ Maps maps, const __grid_constant__ TileGemm g) {
  using L = ExchangedLayout<kOp, kGathered>;
  run_products<kOp, kGathered, L, ExchangedMultiplier<kOp, L>>(maps, g);
  __syncwarp();
  cluster_meet();  // the other block's loads arrive in this one
}

template <GemmOp kOp, Gathered kGathered>
KernelLaunch launch_of_exchanged() {
  using L = ExchangedLayout<kOp, kGathered>;
  return {exchanged_kernel(kOp, kGathered), grouped_exchanged<kOp, kGathered>, L::kThreads,
          L::kBytes};
}

}  // namespace moiety::gemm::sm90
