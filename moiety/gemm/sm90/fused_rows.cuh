// The activation on the accumulators of a group of fused.cuh: rows of H, or of dA, as they are
// rounded, go through shared memory that belongs to a warp, so that loops over them need no
// register of their own for each element.
#pragma once

#include "moiety/formats/octet.cuh"
#include "moiety/gemm/sm90/fused_loader.cuh"

namespace moiety::gemm::sm90 {

// The kinds of activations that the compiler knows apart: kSwiglu is a GLU without limit, offset
// and alpha.
enum class FusedKind { kSwiglu, kGlu, kSquaredRelu };

template <GemmOp kOp, FusedKind kKind, class L>
class FusedRows {
 public:
  static constexpr bool kPaired = kKind != FusedKind::kSquaredRelu;
  static constexpr int kHeld = L::kColumns / 2;  // accumulators of a thread, of 64 rows
  // Columns of F in a tile, of which a loop takes 32 at a time: an octet for each of four lanes.
  static constexpr int kWidth = kOp == GemmOp::kTN && kPaired ? L::kColumns / 2 : L::kColumns;
  static constexpr int kPasses = kWidth / 32;

  __device__ FusedRows(const TileGemm& g, const FusedActivation& f, uint32_t base)
      : g_(g),
        block_(f.block),
        segments_(f.segments),
        own_(base + L::kRows + threadIdx.x / 32 * 16 * L::kPitch),
        warp_(threadIdx.x % kWarpGroup / 32),
        lane_(threadIdx.x % 32) {}

  // Brings what backward reads of H closer while the tile is multiplied.
  __device__ void expect(const Tile& t) const {
    const int row = threadIdx.x % kWarpGroup;
    if (kOp == GemmOp::kTN || row >= t.live) return;
    const auto* h = static_cast<const bf16*>(block_.h) +
                    (int64_t{t.begin} + t.row + row) * block_.h_stride + t.column;
    for (int j = 0; j < kWidth && t.column + j < block_.ffn; j += 64) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(h + j));
      if (kPaired) asm volatile("prefetch.global.L2 [%0];" ::"l"(h + j + block_.ffn));
    }
  }

  // 64 rows of a tile, from `first` on.
  __device__ void finish(const Tile& t, int first, float (&d)[kHeld]) const {
    if (kOp == GemmOp::kTN && g_.epilogue.bias) add_bias(t, d);
    __syncwarp();
    keep(d);
    __syncwarp();
    const int row = first + 16 * warp_ + lane_ / 4;
#pragma unroll 1
    for (int e = 0; e < 2; ++e) {
      const bool live = row + 8 * e < t.live;
      const int64_t at = live ? int64_t{t.begin} + t.row + row + 8 * e : 0;
      const float p = live && block_.prob ? static_cast<const float*>(block_.prob)[at] : 1;
      if constexpr (kOp == GemmOp::kTN) {
        forward(kPaired ? t.column / 2 : t.column, e, at, live, p);
      } else {
        backward(t.column, e, at, live, p);
      }
    }
  }

 private:
  // ---- Rows in shared memory: 16, of which the lane's are lane / 4 and that plus 8.
  __device__ void keep(const float (&d)[kHeld]) const {
    const uint32_t to = own_ + lane_ % 16 * L::kPitch + lane_ / 16 * 16;
#pragma unroll
    for (int i = 0; i < kHeld; i += 8) {
      store_matrices(to + i * 4, bf16_word(d[i], d[i + 1]), bf16_word(d[i + 2], d[i + 3]),
                     bf16_word(d[i + 4], d[i + 5]), bf16_word(d[i + 6], d[i + 7]));
    }
  }
  __device__ uint32_t kept_row(int e) const { return own_ + (lane_ / 4 + 8 * e) * L::kPitch; }
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
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
  }
  __device__ static float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  __device__ static float high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

  __device__ void add_bias(const Tile& t, float (&d)[kHeld]) const {
    const auto* bias =
        static_cast<const uint16_t*>(g_.epilogue.bias) + (g_.groups.first + t.group) * g_.n;
#pragma unroll
    for (int j = 0; j < L::kColumns / 8; ++j) {
      const int local = 8 * j + lane_ % 4 * 2;
      const int f = kPaired ? t.column / 2 + local % kWidth : t.column + local;
      if (f >= block_.ffn) continue;
      const int column = f + (local >= kWidth ? static_cast<int>(block_.ffn) : 0);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float b = __uint_as_float(uint32_t{bias[column + i]} << 16);
        d[4 * j + i] = __fadd_rn(d[4 * j + i], b);
        d[4 * j + 2 + i] = __fadd_rn(d[4 * j + 2 + i], b);
      }
    }
  }

  // ---- The formulas of activation_block.h.
  __device__ Activation activation() const {
    return kKind == FusedKind::kSwiglu ? swiglu() : block_.activation;
  }
  __device__ float value(float a, float b) const {
    return kPaired ? glu(activation(), a, b) : squared_relu(a);
  }

  // `column` is the first of F, `at` the row in the buffers.
  __device__ void forward(int column, int e, int64_t at, bool live, float p) const {
    const int f = column + lane_ % 4 * kOctet;
    auto* h = static_cast<bf16*>(const_cast<void*>(block_.h)) + at * block_.h_stride + f;
    auto* a = static_cast<bf16*>(block_.a) + at * block_.a_stride + f;
    const uint32_t from = kept_row(e) + lane_ % 4 * 16;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const Octet<bf16> x = kept_octet(from + pass * 64);
      Octet<bf16> b;
      if constexpr (kPaired) b = kept_octet(from + pass * 64 + kWidth * 2);
      float v[kOctet];
#pragma unroll
      for (int c = 0; c < kOctet; ++c) v[c] = value(x[c], b[c]) * p;
      if (!live || f + pass * 32 >= block_.ffn) continue;
      store_octet_global<true>(h + pass * 32, x, kOctet);
      if constexpr (kPaired) store_octet_global<true>(h + pass * 32 + block_.ffn, b, kOctet);
      store_octet_global<true>(a + pass * 32, round_octet<bf16>(v), kOctet);
    }
  }

  // Words 8 columns apart, of which lane q of four has columns 2q and 2q + 1.
  struct Words {
    uint32_t word[4] = {};
  };
  // Of four lanes' words, lane q's octet: columns 8q to 8q + 7.
  __device__ Octet<bf16> exchange(const Words& x) const {
    const bool odd = lane_ & 1, upper = lane_ & 2;
    // Blocks of 2 x 2 first, then their elements.
    const uint32_t far0 = __shfl_xor_sync(~0u, upper ? x.word[0] : x.word[2], 2);
    const uint32_t far1 = __shfl_xor_sync(~0u, upper ? x.word[1] : x.word[3], 2);
    const uint32_t a0 = upper ? far0 : x.word[0], a1 = upper ? far1 : x.word[1];
    const uint32_t b0 = upper ? x.word[2] : far0, b1 = upper ? x.word[3] : far1;
    const uint32_t near0 = __shfl_xor_sync(~0u, odd ? a0 : a1, 1);
    const uint32_t near1 = __shfl_xor_sync(~0u, odd ? b0 : b1, 1);
    Octet<bf16> out;
    out.word[0] = odd ? near0 : a0;
    out.word[1] = odd ? a1 : near0;
    out.word[2] = odd ? near1 : b0;
    out.word[3] = odd ? b1 : near1;
    return out;
  }

  // Lanes have the columns of the canonical row dot (swiglu.h), and its segments their order.
  __device__ void backward(int column, int e, int64_t at, bool live, float p) const {
    const int lane = lane_ % 4, ffn = static_cast<int>(block_.ffn);
    const auto* h = static_cast<const bf16*>(block_.h) + at * block_.h_stride + column + 2 * lane;
    auto* dh = static_cast<bf16*>(block_.dh) + at * block_.dh_stride + column + kOctet * lane;
    auto* a = static_cast<bf16*>(block_.a) + at * block_.a_stride + column + kOctet * lane;
    const auto words_of = [&](const bf16* row, int pass) {
      Words out;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int f = pass * 32 + 8 * j;
        if (live && column + f < ffn) out.word[j] = *reinterpret_cast<const uint32_t*>(row + f);
      }
      return out;
    };
    Words x = words_of(h, 0), b, next_x, next_b;
    if constexpr (kPaired) b = words_of(h + ffn, 0);
    float part = 0;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass + 1 < kPasses) {
        next_x = words_of(h, pass + 1);
        if constexpr (kPaired) next_b = words_of(h + ffn, pass + 1);
      }
      Words v, w, y;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t da = kept_word(kept_row(e) + (pass * 4 + j) * 16 + lane * 4);
        const Gradient first = gradient(low(x.word[j]), low(b.word[j]), low(da), p);
        const Gradient second = gradient(high(x.word[j]), high(b.word[j]), high(da), p);
        part = __fmaf_rn(low(da), first.y, part);
        part = __fmaf_rn(high(da), second.y, part);
        v.word[j] = bf16_word(first.a, second.a);
        w.word[j] = bf16_word(first.b, second.b);
        y.word[j] = bf16_word(first.y * p, second.y * p);
      }
      if (segments_ && pass % 2 == 1) {
        store_segment(part, column + pass / 2 * 64, at, live);
        part = 0;
      }
      const Octet<bf16> dx = exchange(v);
      Octet<bf16> db, again;
      if constexpr (kPaired) db = exchange(w);
      if (block_.a) again = exchange(y);
      if (live && column + pass * 32 + kOctet * lane < ffn) {
        store_octet_global<true>(dh + pass * 32, dx, kOctet);
        if constexpr (kPaired) store_octet_global<true>(dh + pass * 32 + ffn, db, kOctet);
        if (block_.a) store_octet_global<true>(a + pass * 32, again, kOctet);
      }
      x = next_x;
      b = next_b;
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
  __device__ void store_segment(float part, int column, int64_t row, bool live) const {
    part += __shfl_xor_sync(~0u, part, 1);
    part += __shfl_xor_sync(~0u, part, 2);
    if (lane_ % 4 == 0 && live && column < block_.ffn) {
      segments_[row * segment_count(block_.ffn) + column / kDotSegment] = part;
    }
  }

  const TileGemm& g_;
  const ActivationBlock& block_;
  float* segments_;
  uint32_t own_;
  int warp_, lane_;
};

}  // namespace moiety::gemm::sm90
