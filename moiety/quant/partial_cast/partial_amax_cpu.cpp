// Phase 1 on CPUs. Threads take tiles; rows of a tile that share blocks are folded into one row of
// maxima first.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/quant/partial_cast/partial_cast_scales.h"
#include "moiety/quant/quantize/ieee_scope.h"

namespace moiety::quant::detail {
namespace {

constexpr int64_t kZeroGrain = 1 << 20;  // bytes of a task

MOIETY_INLINE uint32_t magnitude(float x) { return abs_bits(x); }
MOIETY_INLINE uint32_t magnitude(bf16 x) { return abs_bits(static_cast<float>(x)); }
MOIETY_INLINE uint32_t magnitude(uint32_t maximum) { return maximum; }

template <class T>
MOIETY_INLINE void raise_maxima(const T* __restrict x, int64_t n, uint32_t* __restrict maxima) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t a = magnitude(x[i]);
    maxima[i] = a > maxima[i] ? a : maxima[i];
  }
}

template <class T>
MOIETY_INLINE uint32_t largest_of(const T* x, int64_t n) {
  uint32_t largest = 0;
  // If this loop were not unrolled, blocks of 16 would not be vectorized.
#pragma GCC unroll 1
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t a = magnitude(x[i]);
    largest = a > largest ? a : largest;
  }
  return largest;
}

// Sets amax[b] for every block of kWidth columns that columns [begin, end) meet; x begins at
// `begin`.
template <int kWidth, class T>
MOIETY_INLINE void block_maxima(const T* __restrict x, int64_t begin, int64_t end,
                                uint32_t* __restrict amax) {
  int64_t c = begin;
  if (c % kWidth != 0) {
    const int64_t stop = std::min(end, (c / kWidth + 1) * kWidth);
    amax[c / kWidth] = largest_of(x, stop - c);
    c = stop;
  }
  for (; c + kWidth <= end; c += kWidth) amax[c / kWidth] = largest_of(x + (c - begin), kWidth);
  if (c < end) amax[c / kWidth] = largest_of(x + (c - begin), end - c);
}

// Rounds maxima if the item asks for it; returns the largest.
MOIETY_INLINE uint32_t round_all(const PartialItem& item, int64_t n, uint32_t* amax) {
  const bool through_bf16 = item.spec.through_bf16;
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    amax[i] = rounded_amax(amax[i], through_bf16);
    largest = amax[i] > largest ? amax[i] : largest;
  }
  return largest;
}

// Stores words [first, first + n) of the blocks.
MOIETY_INLINE void store_words(const PartialItem& item, const PartialBlocks& blocks, int64_t first,
                               int64_t n, const uint32_t* __restrict amax, std::byte* reduction) {
  with_rule(
      item, reduction, [&]<class Rule>(const Rule& rule) __attribute__((always_inline)) {
        auto* words = reinterpret_cast<typename Rule::Word*>(reduction + blocks.offset) + first;
        for (int64_t i = 0; i < n; ++i) words[i] = rule.word(amax[i]);
      });
}

// Columns [begin, end) of a tile: a row of the master, or the maxima of the rows of its blocks.
struct TileRow {
  const void* x;
  int64_t begin, end;
};

// Stores the words of the `n` blocks from number `first` on; returns their maximum.
template <class T>
MOIETY_INLINE uint32_t measure_blocks(const PartialItem& item, const TileRow& row, int64_t first,
                                      int64_t n, std::byte* reduction) {
  alignas(64) uint32_t amax[kMaxTileCols / 16];
  const T* x = static_cast<const T*>(row.x);
  for (int64_t b = 0; b < n; ++b) amax[b] = 0;
  if (item.block_cols == 16) {
    block_maxima<16>(x, row.begin, row.end, amax);
  } else if (item.block_cols == 32) {
    block_maxima<32>(x, row.begin, row.end, amax);
  } else {
    block_maxima<128>(x, row.begin, row.end, amax);
  }
  const uint32_t largest = round_all(item, n, amax);
  if (item.row.size() > 0) store_words(item, item.row, first, n, amax, reduction);
  return largest;
}

MOIETY_SIMD_CLONES
uint32_t measure_floats(const PartialItem& item, const TileRow& row, int64_t first, int64_t n,
                        std::byte* reduction) {
  return measure_blocks<float>(item, row, first, n, reduction);
}
MOIETY_SIMD_CLONES
uint32_t measure_bf16(const PartialItem& item, const TileRow& row, int64_t first, int64_t n,
                      std::byte* reduction) {
  return measure_blocks<bf16>(item, row, first, n, reduction);
}
MOIETY_SIMD_CLONES
uint32_t measure_maxima(const PartialItem& item, const TileRow& row, int64_t first, int64_t n,
                        std::byte* reduction) {
  return measure_blocks<uint32_t>(item, row, first, n, reduction);
}
MOIETY_SIMD_CLONES
void store_col_words(const PartialItem& item, int64_t first, int64_t n, uint32_t* maxima,
                     std::byte* reduction) {
  round_all(item, n, maxima);
  store_words(item, item.col, first, n, maxima, reduction);
}

MOIETY_SIMD_CLONES
void raise_by_floats(const void* row, int64_t n, uint32_t* maxima) {
  raise_maxima(static_cast<const float*>(row), n, maxima);
}
MOIETY_SIMD_CLONES
void raise_by_bf16(const void* row, int64_t n, uint32_t* maxima) {
  raise_maxima(static_cast<const bf16*>(row), n, maxima);
}

// Stores the words of a tile's blocks; returns the maximum over the tile.
uint32_t measure_tile(const PartialItem& item, const PartialArrays& arrays, const PartialTile& tile,
                      std::byte* reduction) {
  alignas(64) uint32_t maxima[kMaxTileCols], col_maxima[kMaxTileCols];
  const auto raise = arrays.bf16_master ? raise_by_bf16 : raise_by_floats;
  const auto measure_row = arrays.bf16_master ? measure_bf16 : measure_floats;
  const bool fold = item.block_rows > 1;
  const int64_t blocks = ceil_div(tile.cols, item.block_cols);
  uint32_t largest = 0;
  for (int64_t band = tile.row; band < tile.row + tile.rows; band += item.band) {
    const int64_t band_end = std::min(band + item.band, tile.row + tile.rows);
    if (item.want_col) std::fill_n(col_maxima, tile.cols, 0u);
    for (int64_t r0 = band; r0 < band_end; r0 += item.block_rows) {
      const int64_t first = r0 / item.block_rows * item.row.cols + tile.col / item.block_cols;
      if (fold) std::fill_n(maxima, tile.cols, 0u);
      for (int64_t r = r0; r < std::min(r0 + item.block_rows, band_end); ++r) {
        const OwnedColumns owned = owned_columns(item, tile, r);
        if (owned.begin >= owned.end) continue;
        const TileRow row{owned_elements(item, arrays, r, owned.begin), owned.begin - tile.col,
                          owned.end - tile.col};
        const int64_t n = row.end - row.begin;
        if (fold) raise(row.x, n, maxima + row.begin);
        if (item.want_col) raise(row.x, n, col_maxima + row.begin);
        if (fold) continue;
        largest = std::max(largest, measure_row(item, row, first, blocks, reduction));
      }
      if (!fold) continue;
      const TileRow folded{maxima, 0, tile.cols};
      largest = std::max(largest, measure_maxima(item, folded, first, blocks, reduction));
    }
    if (!item.want_col) continue;
    const int64_t first = band / 32 * item.col.cols + tile.col;
    store_col_words(item, first, tile.cols, col_maxima, reduction);
  }
  return largest;
}

void raise_atomic(uint32_t& word, uint32_t value) {
  const std::atomic_ref<uint32_t> atomic(word);
  uint32_t seen = atomic.load(std::memory_order_relaxed);
  while (seen < value && !atomic.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

void partial_amax_cpu(const PartialCastTable::Impl& table, std::byte* reduction) {
  const PartialCastPlan::Impl& plan = *table.plan;
  parallel_for(plan.reduction_bytes, kZeroGrain,
               [&](int64_t begin, int64_t end) { std::memset(reduction + begin, 0, end - begin); });
  parallel_tasks(static_cast<int64_t>(plan.tiles.size()), [&](int64_t i) {
    const IeeeScope ieee;
    const PartialTile& tile = plan.tiles[i];
    const PartialItem& item = plan.items[tile.item];
    const PartialArrays& arrays = table.arrays[tile.item];
    const uint32_t amax = measure_tile(item, arrays, tile, reduction);
    if (item.tensor_word < 0) return;
    raise_atomic(*reinterpret_cast<uint32_t*>(reduction + item.tensor_word), amax);
  });
}

}  // namespace moiety::quant::detail
