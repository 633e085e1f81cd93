// bf16 products on processors with AVX512-BF16. Its instruction adds to every float the products of
// a pair of elements, first of the upper halves, then of the lower ones, and rounds after each. So
// the even step of the reduction is packed into the upper half, and an accumulator takes the chain
// of gemm.h: the bits are those of the reference whatever the blocking, but for subnormal numbers,
// which the instruction takes and gives as zeros.
//
// The blocking is that of gemm_vector.inc: b is packed into panels of kPanel columns for the whole
// reduction, a block of rows of a is copied beside it, both as words of two steps, and a tile of up
// to kRows x kPanel accumulators runs over `kReduction` steps. Accumulators wait in fp32 scratch
// between such runs.
#include "moiety/gemm/gemm_block.h"

#if defined(__x86_64__)
#include <algorithm>
#include <array>
#include <immintrin.h>
#include <utility>
#include <vector>

#include "moiety/base/integer.h"

namespace moiety::gemm {

bool avx512_bf16_available() { return avx512_available() && __builtin_cpu_supports("avx512bf16"); }

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512vl,avx512bw,avx512dq,avx512bf16")
namespace {

#include "moiety/gemm/avx512/pairs.inc"

constexpr int64_t kRows = 14;
constexpr int64_t kRowBlock = 8 * kRows;  // an odd number of cache lines of pairs
constexpr int64_t kReduction = 512;
constexpr int64_t kRunPairs = kReduction / 2;
constexpr int64_t kRowStride = kRunPairs + kLanes;  // not a power of two: rows in different sets
constexpr int64_t kPackedPairs = 1 << 16;           // of b, packed at a time: 256 KiB, but
constexpr int64_t kPackedColumns = 128;             // at least this many columns

// Copies rows [i0, i0 + m) and steps [p0, p0 + k) of a. Pair p of row i is at
// out[i * kRowStride + p], for kNT at out[p * kRowBlock + i].
void copy_a(const Product& g, int64_t i0, int64_t m, int64_t p0, int64_t k, Pair* out) {
  if (g.op == GemmOp::kNT) {
    for (int64_t p = 0; p < k; p += 2, out += kRowBlock) {
      const bf16* even = g.a.row<bf16>(p0 + p);
      const bf16* odd = p + 1 < k ? g.a.row<bf16>(p0 + p + 1) : nullptr;
      for (int64_t i = 0; i < m; i += kPanel) {
        pack_steps<true>(even ? even + i0 + i : nullptr, odd ? odd + i0 + i : nullptr, m - i,
                         out + i);
      }
    }
    return;
  }
  for (int64_t i = 0; i < m; ++i, out += kRowStride) {
    const bf16* row = g.a.row<bf16>(i0 + i);
    for (int64_t p = 0; p < k; p += 32) {
      _mm512_storeu_si512(out + p / 2,
                          row ? load_pairs<true>(row + p0 + p, k - p) : _mm512_setzero_si512());
    }
  }
}

// out(i, j) = in(i, j) + the chain over pairs of steps; without `in` from +0. Rows that go past the
// caches begin at cache lines.
struct TileAcc {
  const float* in;
  int64_t in_stride;
  float* out;
  int64_t out_stride;
  bool past_caches = false;
};

template <int kTileRows, bool kSteps>  // kSteps: a is laid out as for kNT
void tile(const Pair* a, const Pair* b, int64_t pairs, const TileAcc& acc) {
  constexpr int64_t kRow = kSteps ? 1 : kRowStride, kStep = kSteps ? kRowBlock : 1;
  __m512 c[kTileRows][2];
#pragma GCC unroll 14
  for (int i = 0; i < kTileRows; ++i) {
    for (int v = 0; v < 2; ++v) {
      c[i][v] =
          acc.in ? _mm512_loadu_ps(acc.in + i * acc.in_stride + v * kLanes) : _mm512_setzero_ps();
    }
  }
  for (int64_t p = 0; p < pairs; ++p, a += kStep, b += kPanel) {
    const auto b0 = (__m512bh)_mm512_loadu_si512(b), b1 = (__m512bh)_mm512_loadu_si512(b + kLanes);
#pragma GCC unroll 14
    for (int i = 0; i < kTileRows; ++i) {
      const auto x = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[i * kRow]));
      c[i][0] = _mm512_dpbf16_ps(c[i][0], x, b0);
      c[i][1] = _mm512_dpbf16_ps(c[i][1], x, b1);
    }
  }
  if (acc.past_caches) {
#pragma GCC unroll 14
    for (int i = 0; i < kTileRows; ++i) {
      _mm512_stream_ps(acc.out + i * acc.out_stride, c[i][0]);
      _mm512_stream_ps(acc.out + i * acc.out_stride + kLanes, c[i][1]);
    }
    return;
  }
#pragma GCC unroll 14
  for (int i = 0; i < kTileRows; ++i) {
    _mm512_storeu_ps(acc.out + i * acc.out_stride, c[i][0]);
    _mm512_storeu_ps(acc.out + i * acc.out_stride + kLanes, c[i][1]);
  }
}

using Tile = void (*)(const Pair*, const Pair*, int64_t, const TileAcc&);

template <bool kSteps, size_t... kIndex>
constexpr std::array<Tile, kRows> make_tiles(std::index_sequence<kIndex...>) {
  return {&tile<static_cast<int>(kIndex) + 1, kSteps>...};
}
constexpr std::array<Tile, kRows> kTiles[2] = {
    make_tiles<false>(std::make_index_sequence<kRows>()),
    make_tiles<true>(std::make_index_sequence<kRows>()),
};

// Computes rows [i0, i0 + m) x columns [j0, j0 + n).
void row_block(const Product& g, int64_t i0, int64_t m, int64_t j0, int64_t n, const Pair* packed,
               Pair* copied, float* waiting) {
  const Epilogue& e = g.epilogue;
  const bool plain = e.a_scale.value == 1 && e.b_scale.value == 1 && e.alpha.value == 1 &&
                     e.beta.value == 0 && !e.bias && e.out_dtype == DType::kFloat32;
  const bool steps = g.op == GemmOp::kNT;
  // A weight's gradient is read when all others are made, so that it need not be in the caches, and
  // the lines that it overwrites need not be read: half of its traffic.
  const bool past_caches =
      steps && reinterpret_cast<uintptr_t>(e.out) % 64 == 0 && e.out_stride % kLanes == 0;
  const int64_t pairs = ceil_div(g.k, int64_t{2}), waiting_stride = round_up(n, kPanel);
  const int64_t tiles = ceil_div(m, kRows);
  alignas(64) float registers[kRows * kPanel];
  for (int64_t p = 0; p == 0 || p < g.k; p += kReduction) {
    const int64_t k = std::min(kReduction, g.k - p);
    const bool last = p + k == g.k;
    copy_a(g, i0, m, p, k, copied);
    for (int64_t j = 0; j < n; j += kPanel) {
      const int64_t live = std::min(kPanel, n - j);
      for (int64_t t = 0; t < tiles; ++t) {  // of heights that differ by one row at most
        const int64_t i = t * m / tiles, rows = (t + 1) * m / tiles - i;
        float* wait = waiting + i * waiting_stride + j;
        TileAcc acc{p > 0 ? wait : nullptr, waiting_stride, wait, waiting_stride};
        const bool direct = last && plain && live == kPanel;
        if (direct) {
          acc.out = static_cast<float*>(e.out) + (i0 + i) * e.out_stride + j0 + j;
          acc.out_stride = e.out_stride;
          acc.past_caches = past_caches && (j0 + j) % kLanes == 0;
        } else if (last) {
          acc.out = registers;
          acc.out_stride = kPanel;
        }
        kTiles[steps][rows - 1](copied + i * (steps ? 1 : kRowStride),
                                packed + j * pairs + p / 2 * kPanel, ceil_div(k, int64_t{2}), acc);
        if (!last || direct) continue;
        if (live == kPanel) {  // a constant, to be unrolled
          finish_tile<float>(e, {registers, kPanel, i0 + i, rows, j0 + j, kPanel});
        } else {
          finish_tile<float>(e, {registers, kPanel, i0 + i, rows, j0 + j, live});
        }
      }
    }
  }
}

}  // namespace

void block_gemm_avx512_bf16(const Product& g) {
  thread_local Scratch<Pair> packed_scratch, copied_scratch;
  thread_local Scratch<float> waiting_scratch;
  const int64_t pairs = std::max<int64_t>(ceil_div(g.k, int64_t{2}), 1);
  const int64_t columns = std::max(kPackedColumns, kPackedPairs / pairs / kPanel * kPanel);
  const int64_t widest = round_up(std::min(columns, g.n), kPanel);
  Pair* packed = packed_scratch.get(widest * pairs);
  Pair* copied =
      copied_scratch.get(std::max(kRowBlock * kRowStride, kRunPairs * kRowBlock + kPanel));
  float* waiting = g.k <= kReduction ? nullptr : waiting_scratch.get(kRowBlock * widest);
  const int64_t last_row = g.row + g.m, last_column = g.column + g.n;
  for (int64_t j = g.column; j < last_column; j += columns) {
    const int64_t n = std::min(columns, last_column - j);
    pack_b<true>(g, j, n, pairs, packed);
    for (int64_t i = g.row; i < last_row; i += kRowBlock) {
      row_block(g, i, std::min(kRowBlock, last_row - i), j, n, packed, copied, waiting);
    }
  }
  _mm_sfence();  // what went past the caches is written before others are told
}
#pragma GCC pop_options

}  // namespace moiety::gemm

#else

namespace moiety::gemm {
bool avx512_bf16_available() { return false; }
void block_gemm_avx512_bf16(const Product& block) { block_gemm_reference(block); }
}  // namespace moiety::gemm

#endif
