// How rows of H, or of dA, become activations in fused.cuh: who multiplies hands them over in shared
// memory, rounded, in blocks of 16 rows; warps of their own take the blocks.
#pragma once

#include <type_traits>

#include "moiety/formats/octet.cuh"
#include "moiety/gemm/sm90/fused_loader.cuh"

namespace moiety::gemm::sm90 {

// The kinds of activations that the compiler knows apart: kSwiglu is a GLU without limit, offset
// and alpha.
enum class FusedKind { kSwiglu, kGlu, kSquaredRelu };
// Runs `run` with the activation's kind, a std::integral_constant.
template <class Run>
__device__ __forceinline__ void with_kind(const Activation& a, Run&& run) {
  if (a.kind == ActivationKind::kSquaredRelu) {
    run(std::integral_constant<FusedKind, FusedKind::kSquaredRelu>{});
  } else if (a.alpha == 1 && a.offset == 0 && a.limit == swiglu().limit) {
    run(std::integral_constant<FusedKind, FusedKind::kSwiglu>{});
  } else {
    run(std::integral_constant<FusedKind, FusedKind::kGlu>{});
  }
}
template <FusedKind kKind>
__device__ __forceinline__ Activation activation_of(const Activation& given) {
  return kKind == FusedKind::kSwiglu ? swiglu() : given;
}

// Adds the bias to a thread's sums of a tile, whose columns are `ffn` of each half of H, if they are
// `paired`.
template <int kColumns>
__device__ __forceinline__ void add_bias(const TileGemm& g, const Tile& t, int ffn, bool paired,
                                         float (&d)[kColumns / 2]) {
  const auto* bias =
      static_cast<const uint16_t*>(g.epilogue.bias) + (g.groups.first + t.group) * g.n;
  const int width = paired ? kColumns / 2 : kColumns;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const int local = 8 * j + threadIdx.x % 4 * 2;
    const bool linear = local >= width;
    const int f = (paired ? t.column / 2 : t.column) + local - (linear ? width : 0);
    if (f >= ffn) continue;
    const int column = f + (linear ? ffn : 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float b = low_bf16(bias[column + i]);
      d[4 * j + i] = __fadd_rn(d[4 * j + i], b);
      d[4 * j + 2 + i] = __fadd_rn(d[4 * j + 2 + i], b);
    }
  }
}

// A block of a tile in shared memory, and its barriers, of rows that were handed over and of rows
// that were used. It lies in boxes of 16 rows of 64 bytes, as the copy engine stores them, whose
// pieces of 16 bytes are swizzled by half of their row.
template <class L>
struct Block {
  uint32_t base;  // of shared memory
  int number;

  __device__ uint32_t rows() const { return base + L::kRows + number * L::kBlock; }
  __device__ uint32_t handed() const { return base + L::kHanded + number * 16; }
  __device__ uint32_t used() const { return handed() + 8; }
};

// What a warp that multiplies does with its 16 rows of a tile.
template <GemmOp kOp, class L>
class HandedRows {
 public:
  static constexpr int kHeld = L::kColumns / 2;  // accumulators of a thread

  __device__ HandedRows(const TileGemm& g, const ActivationBlock& block, uint32_t base, int group)
      : g_(g),
        ffn_(static_cast<int>(block.ffn)),
        paired_(block.activation.kind != ActivationKind::kSquaredRelu),
        lane_(threadIdx.x % 32),
        block_{base, group * 4 + static_cast<int>(threadIdx.x) % kWarpGroup / 32} {}

  static constexpr int kWaiting = 0;  // of storer.cuh
  __device__ void expect(const Tile&, int) const {}
  template <int>
  __device__ void store(const Tile& t, int, float (&d)[kHeld]) {
    if (kOp == GemmOp::kTN && g_.epilogue.bias) add_bias<L::kColumns>(g_, t, ffn_, paired_, d);
    barrier_wait(block_.used(), phase_ ^ 1);
    phase_ ^= 1;
    constexpr int kPieces = L::kBoxRow / 16;  // of a row
    const uint32_t row = block_.rows() + lane_ % 16 * L::kBoxRow;
    const uint32_t turn = lane_ / 16 ^ (L::kWide ? lane_ % 8 : lane_ / 2 % 4);
#pragma unroll
    for (int i = 0; i < kHeld; i += 8) {
      store_matrices(row + i / 4 / kPieces * L::kBox + (i / 4 % kPieces ^ turn) * 16,
                     bf16_word(d[i], d[i + 1]), bf16_word(d[i + 2], d[i + 3]),
                     bf16_word(d[i + 4], d[i + 5]), bf16_word(d[i + 6], d[i + 7]));
    }
    if (kOp == GemmOp::kTN) fence_for_engines();  // which stores them
    __syncwarp();
    if (lane_ == 0) barrier_arrive(block_.handed());
  }

 private:
  const TileGemm& g_;
  int ffn_;
  bool paired_;
  int lane_, phase_ = 0;
  Block<L> block_;
};

// A warp that computes activations, of kBlocks blocks of every tile. A pass is 8 rows of a block, an
// eight, and 32 columns of F. Matrices of 8 x 8 in registers give a lane the columns of a row that
// are its part of the canonical row dot (swiglu.h). The copy engine brings H, some passes ahead, into
// slots of the warp, where dH overwrites it as A' does dA, and stores the results.
template <GemmOp kOp, FusedKind kKind, class L>
class FusedRows {
 public:
  static constexpr bool kForward = kOp == GemmOp::kTN;
  static constexpr bool kPaired = kKind != FusedKind::kSquaredRelu;
  static constexpr int kBlocks = L::kBlocks / L::kWriters;
  static constexpr int kWidth = kForward && kPaired ? L::kColumns / 2 : L::kColumns;
  static constexpr int kPasses = kWidth / 32;  // over an eight

  __device__ FusedRows(const FusedActivation& f, const FusedMaps& maps, uint32_t base)
      : block_(f.block),
        segments_(f.segments),
        maps_(maps),
        base_(base),
        warp_(__shfl_sync(~0u, threadIdx.x / 32, 0) - (L::kThreads / 32 - L::kWriters)),
        lane_(threadIdx.x % 32),
        place_(lane_ % 8 * L::kBoxRow + (lane_ / 8 ^ (L::kWide ? lane_ % 8 : lane_ / 2 % 4)) * 16) {
  }

  __device__ void tile(const Tile& t) {
    if (t.live <= 64 * (warp_ * kBlocks / 4)) return;  // nobody multiplies such rows
    first_ = warp_ * kBlocks * 16;
    column_ = kForward && kPaired ? t.column / 2 : t.column;
    const int eights = min(max((t.live - first_ + 7) / 8, 0), 2 * kBlocks);
    passes_ = eights * kPasses;
    if constexpr (!kForward) {
      if (elect_one()) ask(t, 0);
    }
    float next_p = probability(t, 0);
    int pass = 0;
#pragma unroll 1
    for (int eight = 0; eight < 2 * kBlocks; ++eight) {
      const Block<L> block{base_, warp_ * kBlocks + eight / 2};
      if (eight % 2 == 0) barrier_wait(block.handed(), phase_);
      if (eight < eights) {
        const float p = next_p;
        next_p = probability(t, eight + 1);
        const uint32_t kept = block.rows() + eight % 2 * (L::kBox / 2);
        run<kForward>(t, kept, eight, pass, p);
        pass += kPasses;
      }
      if (eight % 2 == 1) {
        if (elect_one()) {
          wait_stores_read<0>();
          barrier_arrive(block.used());
        }
        __syncwarp();
      }
    }
    count_ += passes_;
    phase_ ^= 1;
  }

 private:
  __device__ float probability(const Tile& t, int eight) const {
    const int row = first_ + eight * 8 + lane_ / 4;
    if (row >= t.live || !block_.prob) return 1;
    return static_cast<const float*>(block_.prob)[int64_t{t.begin} + t.row + row];
  }
  // The place of an eight's box in maps of rows.
  __device__ Place place(const Tile& t, int eight, int pass) const {
    const int row = first_ + eight * 8;
    return ragged_place(column_ + pass * 32, t.begin + t.row + row, min(t.live - row, 8));
  }

  // ---- The formulas of activation_block.h.
  __device__ Activation activation() const { return activation_of<kKind>(block_.activation); }
  __device__ float value(float a, float b) const {
    return kPaired ? glu(activation(), a, b) : squared_relu(a);
  }
  struct Gradient {
    float y, a, b;
  };
  __device__ Gradient gradient(float a, float b, float da, float p) const {
    const float t = da * p;
    if constexpr (kPaired) {
      const ActivationGradient<float> g = glu_gradient(activation(), a, b, t);
      return {g.y, g.a, g.b};
    } else {
      return {squared_relu(a), squared_relu_gradient(a, t), 0};
    }
  }

  // The slot of a pass, counted over all tiles, and the barrier at which its H has come.
  __device__ uint32_t slot(int i) const {
    return base_ + L::kHidden + (warp_ * L::kSlots + i % L::kSlots) * L::kSlot;
  }
  __device__ uint32_t come(int i) const {
    return base_ + L::kCome + (warp_ * L::kSlots + i % L::kSlots) * 8;
  }

  template <bool kIsForward>
  __device__ void run(const Tile& t, uint32_t kept, int eight, int before, float p) {
    if constexpr (kIsForward) {
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) forward(t, kept, eight, before, pass, p);
    } else {
      float part = 0;
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) backward(t, kept, eight, before, pass, p, part);
    }
  }

  __device__ void forward(const Tile& t, uint32_t kept, int eight, int before, int pass, float p) {
    const uint32_t box = kept + pass * L::kBox, to = slot(count_ + before + pass);
    uint32_t x[4], b[4] = {};
    load_matrices(x, box + place_);
    if constexpr (kPaired) load_matrices(b, box + kPasses * L::kBox + place_);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = bf16_word(value(low_bf16(x[j]), low_bf16(b[j])) * p,
                       value(high_bf16(x[j]), high_bf16(b[j])) * p);
    }
    if (elect_one()) wait_stores_read<L::kSlots - 1>();
    __syncwarp();
    store_matrices(to + place_, x[0], x[1], x[2], x[3]);
    fence_for_engines();
    __syncwarp();
    if (elect_one()) {
      const Place at = place(t, eight, pass);
      store_tile(maps_.h[0], box, at);
      if constexpr (kPaired) store_tile(maps_.h[1], box + kPasses * L::kBox, at);
      store_tile(maps_.a, to, at);
      commit_stores();
    }
  }

  // ---- Backward.
  // Asks for H of two passes of the tile; one lane does.
  __device__ void ask(const Tile& t, int i) const {
    constexpr int kPairs = kPasses / 2;
    if (i >= passes_ / 2) return;
    const int eight = i / kPairs;
    const Place at = place(t, eight, (i - eight * kPairs) * 2);
    const uint32_t to = slot(count_ / 2 + i), barrier = come(count_ / 2 + i);
    barrier_arrive_expecting(barrier, kPaired ? L::kSlot : L::kSlot / 2);
    load_tile(to, maps_.h[0], barrier, at);
    if constexpr (kPaired) load_tile(to + L::kSlot / 2, maps_.h[1], barrier, at);
  }

  __device__ void backward(const Tile& t, uint32_t kept, int eight, int before, int pass, float p,
                           float& part) {
    const int i = (count_ + before + pass) / 2;
    const bool second = pass % 2 == 1;
    const uint32_t box = kept + pass / 2 * L::kBox, hidden = slot(i);
    const uint32_t at_box = box + (place_ ^ second * 64), at_slot = hidden + (place_ ^ second * 64);
    uint32_t x[4], b[4] = {}, da[4];
    load_matrices(da, at_box);
    barrier_wait(come(i), i / L::kSlots & 1);
    load_matrices(x, at_slot);
    if constexpr (kPaired) load_matrices(b, at_slot + L::kSlot / 2);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Gradient first = gradient(low_bf16(x[j]), low_bf16(b[j]), low_bf16(da[j]), p);
      const Gradient second = gradient(high_bf16(x[j]), high_bf16(b[j]), high_bf16(da[j]), p);
      part = __fmaf_rn(low_bf16(da[j]), first.y, part);
      part = __fmaf_rn(high_bf16(da[j]), second.y, part);
      x[j] = bf16_word(first.a, second.a);
      b[j] = bf16_word(first.b, second.b);
      da[j] = bf16_word(first.y * p, second.y * p);
    }
    if (!second && elect_one()) {
      wait_stores_read<0>();  // the slot of the passes before is free
      ask(t, (before + pass) / 2 + 1);
    }
    __syncwarp();
    store_matrices(at_slot, x[0], x[1], x[2], x[3]);
    if constexpr (kPaired) store_matrices(at_slot + L::kSlot / 2, b[0], b[1], b[2], b[3]);
    store_matrices(at_box, da[0], da[1], da[2], da[3]);
    if (!second) return;
    fence_for_engines();
    __syncwarp();
    if (elect_one()) {
      const Place at = place(t, eight, pass - 1);
      store_tile(maps_.dh[0], hidden, at);
      if constexpr (kPaired) store_tile(maps_.dh[1], hidden + L::kSlot / 2, at);
      if (block_.a) store_tile(maps_.a, box, at);
      commit_stores();
    }
    if (segments_) store_segment(t, eight, pass, part);
    part = 0;
  }
  // Columns that do not exist are 0 and have changed no bit.
  __device__ void store_segment(const Tile& t, int eight, int pass, float part) const {
    part += __shfl_xor_sync(~0u, part, 1);
    part += __shfl_xor_sync(~0u, part, 2);
    const int row = first_ + eight * 8 + lane_ / 4, column = column_ + (pass - 1) * 32;
    if (lane_ % 4 != 0 || row >= t.live || column >= block_.ffn) return;
    segments_[(int64_t{t.begin} + t.row + row) * segment_count(block_.ffn) + column / kDotSegment] =
        part;
  }

  const ActivationBlock& block_;
  float* segments_;
  const FusedMaps& maps_;
  uint32_t base_;
  int warp_, lane_;
  uint32_t place_;                           // of the lane's row of a matrix, in 8 rows of a box
  int first_ = 0, column_ = 0, passes_ = 0;  // of the tile
  int count_ = 0;                            // passes of the tiles before
  int phase_ = 0;
};

}  // namespace moiety::gemm::sm90
