// How rows of H, or of dA, become activations in fused.cuh: who multiplies hands them over in shared
// memory, rounded, in blocks of 16 rows; warps of their own take the blocks.
#pragma once

#include "moiety/formats/octet.cuh"
#include "moiety/gemm/sm90/fused_loader.cuh"

namespace moiety::gemm::sm90 {

// The kinds of activations that the compiler knows apart: kSwiglu is a GLU without limit, offset
// and alpha.
enum class FusedKind { kSwiglu, kGlu, kSquaredRelu };

// A block of a tile in shared memory: rows of L::kPitch bytes, whose pieces of 16 bytes are swizzled
// by their row; and its barriers, of rows that were handed over and of rows that were used.
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

  __device__ void expect(const Tile&, int) const {}
  __device__ void store(const Tile& t, int, float (&d)[kHeld]) {
    if (kOp == GemmOp::kTN && g_.epilogue.bias) add_bias(t, d);
    barrier_wait(block_.used(), phase_ ^ 1);
    phase_ ^= 1;
    const uint32_t row = block_.rows() + lane_ % 16 * L::kPitch, turn = lane_ / 16 ^ lane_ % 8;
#pragma unroll
    for (int i = 0; i < kHeld; i += 8) {
      store_matrices(row + (i / 4 ^ turn) * 16, bf16_word(d[i], d[i + 1]),
                     bf16_word(d[i + 2], d[i + 3]), bf16_word(d[i + 4], d[i + 5]),
                     bf16_word(d[i + 6], d[i + 7]));
    }
    __syncwarp();
    if (lane_ == 0) barrier_arrive(block_.handed());
  }

 private:
  __device__ void add_bias(const Tile& t, float (&d)[kHeld]) const {
    const auto* bias =
        static_cast<const uint16_t*>(g_.epilogue.bias) + (g_.groups.first + t.group) * g_.n;
    const int width = paired_ ? L::kColumns / 2 : L::kColumns;
#pragma unroll
    for (int j = 0; j < L::kColumns / 8; ++j) {
      const int local = 8 * j + lane_ % 4 * 2;
      const bool linear = local >= width;
      const int f = (paired_ ? t.column / 2 : t.column) + local - (linear ? width : 0);
      if (f >= ffn_) continue;
      const int column = f + (linear ? ffn_ : 0);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float b = __uint_as_float(uint32_t{bias[column + i]} << 16);
        d[4 * j + i] = __fadd_rn(d[4 * j + i], b);
        d[4 * j + 2 + i] = __fadd_rn(d[4 * j + 2 + i], b);
      }
    }
  }

  const TileGemm& g_;
  int ffn_;
  bool paired_;
  int lane_, phase_ = 0;
  Block<L> block_;
};

// A warp that computes activations, of kBlocks blocks of every tile. A pass is 8 rows of a block
// and 32 columns of F; four lanes have a row's.
template <GemmOp kOp, FusedKind kKind, class L>
class FusedRows {
 public:
  static constexpr bool kPaired = kKind != FusedKind::kSquaredRelu;
  static constexpr int kBlocks = L::kBlocks / L::kWriters;
  static constexpr int kWidth = kOp == GemmOp::kTN && kPaired ? L::kColumns / 2 : L::kColumns;
  static constexpr int kPasses = kWidth / 32;         // over 8 rows
  static constexpr int kAll = kBlocks * 2 * kPasses;  // over the warp's rows

  __device__ FusedRows(const TileGemm& g, const FusedActivation& f, uint32_t base)
      : g_(g),
        block_(f.block),
        segments_(f.segments),
        base_(base),
        warp_(threadIdx.x / 32 - (kGroups + 1) * (kWarpGroup / 32)),
        lane_(threadIdx.x % 32),
        row_((lane_ / 4 & 1) * 4 + lane_ / 8) {}

  __device__ void tile(const Tile& t) {
    if (t.live <= 64 * (warp_ * kBlocks / 4)) return;  // nobody multiplies such rows
    const int column = kOp == GemmOp::kTN && kPaired ? t.column / 2 : t.column;
    if constexpr (kOp == GemmOp::kNN) {
      bring_closer(t);
#pragma unroll
      for (int i = 0; i + 1 < L::kSlots; ++i) ask(t, i);
    }
    float next_p = probability(t, 0);
    Rows rows;
#pragma unroll 1
    for (int i = 0; i < kAll; ++i) {
      const int pass = i % kPasses;
      if (pass == 0) {
        rows = rows_of(t, i / kPasses, column);
        rows.p = next_p;
        next_p = probability(t, i / kPasses + 1);
        if (i % (2 * kPasses) == 0) barrier_wait(rows.block.handed(), phase_);
      }
      if constexpr (kOp == GemmOp::kTN) {
        forward(rows, pass);
      } else {
        backward(t, rows, i, pass);
      }
      if ((i + 1) % (2 * kPasses) == 0) {
        __syncwarp();
        if (lane_ == 0) barrier_arrive(rows.block.used());
      }
    }
    phase_ ^= 1;
  }

 private:
  // Where the lane's row of 8 lies, `eight` of the warp's.
  struct Rows {
    Block<L> block;
    uint32_t kept;  // its row in shared memory
    bf16 *h, *a;    // from the lane's first octet on; h: dH, backward
    int left;       // columns of F from there on; none if the row is not alive
    float p;
    float* segment;  // of dprob
    float part;
  };
  __device__ int row_in_tile(int eight) const { return (warp_ * kBlocks * 2 + eight) * 8 + row_; }
  __device__ Rows rows_of(const Tile& t, int eight, int column) const {
    Rows out;
    const int row = row_in_tile(eight), first = column + lane_ % 4 * kOctet;
    const int64_t at = int64_t{t.begin} + t.row + row;
    out.block = {base_, warp_ * kBlocks + eight / 2};
    out.kept = out.block.rows() + (eight % 2 * 8 + row_) * L::kPitch;
    out.left = row < t.live ? static_cast<int>(block_.ffn) - first : 0;
    void* const h = kOp == GemmOp::kTN ? const_cast<void*>(block_.h) : block_.dh;
    const int64_t stride = kOp == GemmOp::kTN ? block_.h_stride : block_.dh_stride;
    out.h = static_cast<bf16*>(h) + at * stride + first;
    out.a = static_cast<bf16*>(block_.a) + at * block_.a_stride + first;
    out.segment = segments_ + at * segment_count(block_.ffn) + column / kDotSegment;
    out.part = 0;
    return out;
  }
  __device__ float probability(const Tile& t, int eight) const {
    const int row = row_in_tile(eight);
    if (eight >= 2 * kBlocks || row >= t.live || !block_.prob) return 1;
    return static_cast<const float*>(block_.prob)[int64_t{t.begin} + t.row + row];
  }

  __device__ static Octet<bf16> kept_octet(uint32_t at) {
    Octet<bf16> x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
                 : "r"(at)
                 : "memory");
    return x;
  }
  __device__ static uint32_t kept_word(uint32_t at) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at));
    return x;
  }
  __device__ static void keep_word(uint32_t at, uint32_t x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x));
  }
  __device__ static float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  __device__ static float high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

  // ---- The formulas of activation_block.h.
  __device__ Activation activation() const {
    return kKind == FusedKind::kSwiglu ? swiglu() : block_.activation;
  }
  __device__ float value(float a, float b) const {
    return kPaired ? glu(activation(), a, b) : squared_relu(a);
  }

  // An octet's piece in the lane's row, of the pass.
  __device__ uint32_t kept_piece(const Rows& rows, int piece) const {
    return rows.kept + (piece ^ row_) * 16;
  }

  __device__ void forward(const Rows& rows, int pass) const {
    const int piece = pass * 4 + lane_ % 4;
    const Octet<bf16> x = kept_octet(kept_piece(rows, piece));
    Octet<bf16> b;
    if constexpr (kPaired) b = kept_octet(kept_piece(rows, piece + kWidth / kOctet));
    float v[kOctet];
#pragma unroll
    for (int c = 0; c < kOctet; ++c) v[c] = value(x[c], b[c]) * rows.p;
    if (pass * 32 >= rows.left) return;
    store_octet_global<true>(rows.h + pass * 32, x, kOctet);
    if constexpr (kPaired) {
      store_octet_global<true>(rows.h + pass * 32 + block_.ffn, b, kOctet);
    }
    store_octet_global<true>(rows.a + pass * 32, round_octet<bf16>(v), kOctet);
  }

  // ---- Backward reads H, some passes ahead, into slots of the warp, and overwrites it there by dH
  // and the handed rows by A': lanes compute the columns of the canonical row dot (swiglu.h), and
  // store octets.
  __device__ void bring_closer(const Tile& t) const {
    for (int row = lane_; row < kBlocks * 16; row += 32) {
      const int r = warp_ * kBlocks * 16 + row;
      if (r >= t.live) continue;
      const auto* h = static_cast<const bf16*>(block_.h) +
                      (int64_t{t.begin} + t.row + r) * block_.h_stride + t.column;
      for (int j = 0; j < kWidth && t.column + j < block_.ffn; j += 64) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(h + j));
        if (kPaired) asm volatile("prefetch.global.L2 [%0];" ::"l"(h + j + block_.ffn));
      }
    }
  }
  // The lane's row of a slot. Rows 4 apart are neighbours there.
  __device__ uint32_t slot(int i) const {
    return base_ + L::kHidden + (warp_ * L::kSlots + i % L::kSlots) * L::kSlot + lane_ / 4 * 64;
  }
  __device__ uint32_t slot_piece(int piece) const { return (piece + lane_ / 8 & 3) * 16; }
  // Pass i's octets of H.
  __device__ void ask(const Tile& t, int i) const {
    if (i < kAll) {
      const int eight = i / kPasses, row = row_in_tile(eight);
      const int f = t.column + (i - eight * kPasses) * 32 + lane_ % 4 * kOctet;
      const int bytes = row < t.live && f < block_.ffn ? 16 : 0;
      const auto* h = static_cast<const bf16*>(block_.h);
      if (bytes > 0) h += (int64_t{t.begin} + t.row + row) * block_.h_stride + f;
      const uint32_t to = slot(i) + slot_piece(lane_ % 4);
      copy_16(to, h, bytes);
      if constexpr (kPaired) copy_16(to + L::kSlot / 2, bytes > 0 ? h + block_.ffn : h, bytes);
    }
    commit_copies();
  }

  __device__ void backward(const Tile& t, Rows& rows, int i, int pass) const {
    wait_copies_but<L::kSlots - 2>();
    __syncwarp();  // also: the slot before was used
    ask(t, i + L::kSlots - 1);
    const uint32_t hidden = slot(i), word = lane_ % 4 * 4;
    uint32_t x[4], b[4],
        da[4];  // all before the first is overwritten, so that they are on their way
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = kept_word(hidden + slot_piece(j) + word);
      b[j] = kPaired ? kept_word(hidden + slot_piece(j) + word + L::kSlot / 2) : 0;
      da[j] = kept_word(kept_piece(rows, pass * 4 + j) + word);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Gradient first = gradient(low(x[j]), low(b[j]), low(da[j]), rows.p);
      const Gradient second = gradient(high(x[j]), high(b[j]), high(da[j]), rows.p);
      rows.part = __fmaf_rn(low(da[j]), first.y, rows.part);
      rows.part = __fmaf_rn(high(da[j]), second.y, rows.part);
      x[j] = bf16_word(first.a, second.a);
      b[j] = bf16_word(first.b, second.b);
      da[j] = bf16_word(first.y * rows.p, second.y * rows.p);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      keep_word(hidden + slot_piece(j) + word, x[j]);
      if constexpr (kPaired) keep_word(hidden + slot_piece(j) + word + L::kSlot / 2, b[j]);
      keep_word(kept_piece(rows, pass * 4 + j) + word, da[j]);
    }
    if (segments_ && pass % 2 == 1) {
      store_segment(rows, pass);
      rows.part = 0;
    }
    __syncwarp();
    if (pass * 32 >= rows.left) return;
    const uint32_t at = hidden + slot_piece(lane_ % 4);
    store_octet_global<true>(rows.h + pass * 32, kept_octet(at), kOctet);
    if constexpr (kPaired) {
      store_octet_global<true>(rows.h + pass * 32 + block_.ffn, kept_octet(at + L::kSlot / 2),
                               kOctet);
    }
    if (block_.a) {
      store_octet_global<true>(rows.a + pass * 32,
                               kept_octet(kept_piece(rows, pass * 4 + lane_ % 4)), kOctet);
    }
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
  // Columns that do not exist are 0 and have changed no bit.
  __device__ void store_segment(const Rows& rows, int pass) const {
    float part = rows.part;
    part += __shfl_xor_sync(~0u, part, 1);
    part += __shfl_xor_sync(~0u, part, 2);
    if (lane_ % 4 == 0 && (pass & ~1) * 32 < rows.left) rows.segment[pass / 2] = part;
  }

  const TileGemm& g_;
  const ActivationBlock& block_;
  float* segments_;
  uint32_t base_;
  int warp_, lane_, row_, phase_ = 0;
};

}  // namespace moiety::gemm::sm90
