// bf16 products on processors with AMX. Its instruction multiplies 16 rows of 16 pairs of steps of
// the reduction with 16 pairs of 16 columns. It sums up the even and the odd steps of those 32, each
// from zero and rounded like fused multiply-adds, then adds one sum to the other and both to the
// accumulator. Steps are taken by 32 from the first one, so an element's bits depend on its row and
// its column alone, whatever the blocking, the rows and the threads. Subnormals are zeros.
//
// b is packed into panels as in gemm_bf16.cpp. Rows of a are copied tile by tile, so that a tile's load
// reads 1 KiB that the prefetchers see coming; for kNT they are turned around. Four accumulators of
// 16 x 16 run over `kReduction` steps, and wait in fp32 scratch between such runs.
#include "moiety/gemm/gemm_block.h"

#if defined(__x86_64__) && defined(__linux__)
#include <algorithm>
#include <array>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "moiety/base/integer.h"

namespace moiety::gemm {

// The kernel gives a process the tiles' registers once it has asked for them.
bool amx_available() {
  static const bool available = [] {
    constexpr long kAskForState = 0x1023, kTileData = 18;
    return avx512_bf16_available() && __builtin_cpu_supports("amx-tile") &&
           __builtin_cpu_supports("amx-bf16") &&
           ::syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
  }();
  return available;
}

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,amx-tile,amx-bf16")
namespace {

#include "moiety/gemm/avx512/pairs.inc"

constexpr int64_t kTile = 16;  // rows and columns of a tile, and pairs of one product
constexpr int64_t kPairTile = 2 * kTile;
constexpr int64_t kRowBlock = 128;
constexpr int64_t kReduction = 1024;
constexpr int64_t kTilePairs = kTile * kTile;
constexpr int64_t kAhead = 4;              // rows that are asked for before they are copied
constexpr int64_t kPackedPairs = 1 << 18;  // of b, packed at a time: 1 MiB, but
constexpr int64_t kPackedColumns = 128;    // at least this many columns

// Eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileShapes) == 64);
constexpr TileShapes kShapes;

// The tiles of 16 rows and 32 steps of a, those of 16 rows one behind the other, `runs` of them. Steps
// past the end of the reduction are zeros.

// Turns steps [p0, p0 + k) of columns [i0, i0 + m) of a into rows of tiles.
void turn_a(const Product& g, int64_t i0, int64_t m, int64_t p0, int64_t k, Pair* out) {
  const int64_t runs = ceil_div(k, kPairTile);
  for (int64_t p = 0; p < k; p += 2 * kTile) {
    const bf16* steps[2 * kTile];
    for (int64_t s = 0; s < 2 * kTile; ++s) {
      steps[s] = p + s < k ? g.a.row<bf16>(p0 + p + s) : nullptr;
    }
    for (int64_t i = 0; i < m; i += kPanel) {
      alignas(64) Pair columns[kTile][kPanel];
      for (int64_t q = 0; q < kTile; ++q) {
        const bf16 *even = steps[2 * q], *odd = steps[2 * q + 1];
        pack_steps<false>(even ? even + i0 + i : nullptr, odd ? odd + i0 + i : nullptr, m - i,
                          columns[q]);
      }
      for (int64_t half = 0; half < 2; ++half) {
        __m512i x[kTile];
#pragma GCC unroll 16
        for (int q = 0; q < kTile; ++q) x[q] = _mm512_load_si512(columns[q] + half * kTile);
        transpose16(x);
        Pair* tile = out + ((i / kTile + half) * runs + p / kPairTile) * kTilePairs;
#pragma GCC unroll 16
        for (int r = 0; r < kTile; ++r) _mm512_store_si512(tile + r * kTile, x[r]);
      }
    }
  }
}

// Copies rows [i0, i0 + m) and steps [p0, p0 + k) of a into tiles.
void copy_a(const Product& g, int64_t i0, int64_t m, int64_t p0, int64_t k, Pair* out) {
  const int64_t runs = ceil_div(k, kPairTile);
  for (int64_t i = 0; i < m; ++i) {
    const bf16* row = g.a.row<bf16>(i0 + i);
    const bf16* later = g.a.row<bf16>(i0 + std::min(i + kAhead, m - 1));
    Pair* to = out + i / kTile * runs * kTilePairs + i % kTile * kTile;
    for (int64_t p = 0; p < k; p += kPairTile, to += kTilePairs) {
      if (later) _mm_prefetch(later + p0 + p, _MM_HINT_T0);
      _mm512_store_si512(to, row ? load32(row + p0 + p, k - p) : _mm512_setzero_si512());
    }
  }
}

// Up to 32 x 32 accumulators: out = in (or 0) + a b over `runs` times 32 steps.
template <bool kTwoRows, bool kTwoColumns>
void tile(const Pair* a, const Pair* b, int64_t runs, const float* in, int64_t in_stride,
          float* out, int64_t out_stride) {
  constexpr int64_t kPanelBytes = kPanel * sizeof(Pair), kTileBytes = kTile * sizeof(Pair);
  const int64_t in_bytes = in_stride * 4, out_bytes = out_stride * 4;
  asm volatile("" ::: "memory");  // the loads of tiles do not say what they read
  if (in) {
    _tile_loadd(0, in, in_bytes);
    if constexpr (kTwoColumns) _tile_loadd(1, in + kTile, in_bytes);
    if constexpr (kTwoRows) _tile_loadd(2, in + kTile * in_stride, in_bytes);
    if constexpr (kTwoRows && kTwoColumns) {
      _tile_loadd(3, in + kTile * in_stride + kTile, in_bytes);
    }
  } else {
    _tile_zero(0);
    if constexpr (kTwoColumns) _tile_zero(1);
    if constexpr (kTwoRows) _tile_zero(2);
    if constexpr (kTwoRows && kTwoColumns) _tile_zero(3);
  }
  const Pair* second = a + runs * kTilePairs;
  for (int64_t r = 0; r < runs; ++r, b += kTile * kPanel, a += kTilePairs, second += kTilePairs) {
    _tile_loadd(6, b, kPanelBytes);
    _tile_loadd(4, a, kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoColumns) {
      _tile_loadd(7, b + kTile, kPanelBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTwoRows) {
      _tile_loadd(5, second, kTileBytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kTwoColumns) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, out_bytes);
  if constexpr (kTwoColumns) _tile_stored(1, out + kTile, out_bytes);
  if constexpr (kTwoRows) _tile_stored(2, out + kTile * out_stride, out_bytes);
  if constexpr (kTwoRows && kTwoColumns) {
    _tile_stored(3, out + kTile * out_stride + kTile, out_bytes);
  }
  asm volatile("" ::: "memory");
}

constexpr decltype(&tile<true, true>) kTiles[2][2] = {{tile<false, false>, tile<false, true>},
                                                      {tile<true, false>, tile<true, true>}};

// A weight's gradient is read when all others are made: it goes past the caches.
void stream(const float* in, float* out, int64_t out_stride) {
  for (int64_t r = 0; r < kPairTile; ++r) {
    _mm512_stream_ps(out + r * out_stride, _mm512_load_ps(in + r * kPanel));
    _mm512_stream_ps(out + r * out_stride + kLanes, _mm512_load_ps(in + r * kPanel + kLanes));
  }
}

// Asks for the lines that rows of a result are stored to, while they are computed: stores that wait for
// memory halve the rate of products with a short reduction.
void fetch(const std::byte* out, int64_t rows, int64_t row_bytes, int64_t bytes) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t b = 0; b < bytes; b += 64) _mm_prefetch(out + r * row_bytes + b, _MM_HINT_T1);
  }
}

// Stores rows of accumulators as bf16 and says whether none is NaN, which has to be stored anew.
// Accumulators are no subnormals, of which the instruction makes zeros.
bool round_rows(const float* in, int64_t rows, bf16* out, int64_t out_stride) {
  __mmask16 nan = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const __m512 low = _mm512_load_ps(in + r * kPanel);
    const __m512 high = _mm512_load_ps(in + r * kPanel + kLanes);
    nan |= _mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q);
    _mm512_storeu_si512(out + r * out_stride,
                        reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
  }
  return nan == 0;
}

// Computes rows [i0, i0 + m) x columns [j0, j0 + n).
void row_block(const Product& g, int64_t i0, int64_t m, int64_t j0, int64_t n, const Pair* packed,
               int64_t pairs, Pair* copied, float* waiting) {
  const Epilogue& e = g.epilogue;
  const bool bare = e.a_scale.value == 1 && e.b_scale.value == 1 && e.alpha.value == 1 &&
                    e.beta.value == 0 && !e.bias;
  const bool plain = bare && e.out_dtype == DType::kFloat32;
  const bool turned = g.op == GemmOp::kNT;
  const bool past_caches =
      turned && reinterpret_cast<uintptr_t>(e.out) % 64 == 0 && e.out_stride % kLanes == 0;
  const int64_t waiting_stride = round_up(n, kPanel), out_size = byte_size(e.out_dtype, 1);
  alignas(64) float out[kPairTile * kPanel];
  for (int64_t p = 0; p == 0 || p < g.k; p += kReduction) {
    const int64_t k = std::min(kReduction, g.k - p);
    const bool last = p + k == g.k;
    if (turned) {
      turn_a(g, i0, m, p, k, copied);
    } else {
      copy_a(g, i0, m, p, k, copied);
    }
    const int64_t runs = ceil_div(k, kPairTile);
    for (int64_t j = 0; j < n; j += kPanel) {
      const int64_t live = std::min(kPanel, n - j);
      for (int64_t i = 0; i < m; i += kPairTile) {
        const int64_t rows = std::min(kPairTile, m - i);
        float* const wait = waiting + i * waiting_stride + j;
        const bool full = last && plain && live == kPanel && rows == kPairTile;
        const bool streamed = full && past_caches && (j0 + j) % kLanes == 0;
        float* const place = static_cast<float*>(e.out) + (i0 + i) * e.out_stride + j0 + j;
        float* to = last ? out : wait;
        int64_t to_stride = last ? kPanel : waiting_stride;
        if (full && !streamed) {
          to = place;
          to_stride = e.out_stride;
        }
        if (last && !streamed) {
          fetch(
              static_cast<const std::byte*>(e.out) + ((i0 + i) * e.out_stride + j0 + j) * out_size,
              rows, e.out_stride * out_size, live * out_size);
        }
        kTiles[rows > kTile][live > kTile](copied + i * runs * kTile,
                                           packed + j * pairs + p / 2 * kPanel, runs,
                                           p > 0 ? wait : nullptr, waiting_stride, to, to_stride);
        if (streamed) stream(out, place, e.out_stride);
        if (!last || full) continue;
        if (bare && !plain && live == kPanel &&
            round_rows(out, rows, static_cast<bf16*>(e.out) + (i0 + i) * e.out_stride + j0 + j,
                       e.out_stride)) {
          continue;
        }
        if (live == kPanel) {  // a constant, to be unrolled
          finish_tile<float>(e, {out, kPanel, i0 + i, rows, j0 + j, kPanel});
        } else {
          finish_tile<float>(e, {out, kPanel, i0 + i, rows, j0 + j, live});
        }
      }
    }
  }
}

}  // namespace

void block_gemm_amx(const Product& g) {
  thread_local Scratch<Pair> packed_scratch, copied_scratch;
  thread_local Scratch<float> waiting_scratch;
  const int64_t pairs = std::max(round_up(ceil_div(g.k, int64_t{2}), kTile), kTile);
  const int64_t columns = std::max(kPackedColumns, kPackedPairs / pairs / kPanel * kPanel);
  const int64_t widest = round_up(std::min(columns, g.n), kPanel);
  Pair* packed = packed_scratch.get(widest * pairs);
  Pair* copied = copied_scratch.get(kRowBlock * kReduction / 2);
  float* waiting = g.k <= kReduction ? nullptr : waiting_scratch.get(kRowBlock * widest);
  const int64_t last_row = g.row + g.m, last_column = g.column + g.n;
  _tile_loadconfig(&kShapes);
  for (int64_t j = g.column; j < last_column; j += columns) {
    const int64_t n = std::min(columns, last_column - j);
    pack_b<false>(g, j, n, pairs, packed);
    for (int64_t i = g.row; i < last_row; i += kRowBlock) {
      row_block(g, i, std::min(kRowBlock, last_row - i), j, n, packed, pairs, copied, waiting);
    }
  }
  _tile_release();
  _mm_sfence();  // what went past the caches is written before others are told
}
#pragma GCC pop_options

}  // namespace moiety::gemm

#else

namespace moiety::gemm {
bool amx_available() { return false; }
void block_gemm_amx(const Product& block) { block_gemm_reference(block); }
}  // namespace moiety::gemm

#endif
