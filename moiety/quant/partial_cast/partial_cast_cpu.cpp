// Phase 3 on CPUs. Threads take tiles and pieces of scales. A tile has a factor for every pair of
// columns, side by side, so that the loops of the quantizers serve blocks of all shapes.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/quant/partial_cast/partial_cast_scales.h"
#include "moiety/quant/quantize/ieee_scope.h"
#include "moiety/quant/quantize/quantize_loops.h"
#include "moiety/quant/quantize/stream_bytes.h"

namespace moiety::quant::detail {
namespace {

constexpr int64_t kItemGrain = 64;
constexpr int64_t kGroup = 16;  // elements that are encoded together

// The factors of the pairs of a tile's columns, in the row or the col direction, and whether all
// elements are finite.
struct TileFactors {
  alignas(64) float even[kMaxTileCols / 2];
  alignas(64) float odd[kMaxTileCols / 2];  // not used by rows, since blocks hold whole pairs
  bool finite;
};

bool all_finite(const float* factor, int64_t n) {
  return loops::largest(reinterpret_cast<const uint32_t*>(factor), n) < 0x7F800000u;
}

// out[b] = the factor of the codes of block first + b.
MOIETY_SIMD_CLONES
void block_factors(const PartialItem& item, const std::byte* reduction, int64_t first, int64_t n,
                   float* __restrict out) {
  with_rule(
      item, reduction, [&]<class Rule>(const Rule& rule) __attribute__((always_inline)) {
        const auto* words =
            reinterpret_cast<const typename Rule::Word*>(reduction + item.row.offset) + first;
        for (int64_t b = 0; b < n; ++b) out[b] = rule.encode(words[b]);
      });
}

// Loads the factors of `n` blocks from number `first` on.
void load_row_factors(const PartialItem& item, const std::byte* reduction, int64_t first, int64_t n,
                      TileFactors* out) {
  alignas(64) float factor[kMaxTileCols / 16];
  block_factors(item, reduction, first, n, factor);
  out->finite = all_finite(factor, n);
  loops::spread(factor, static_cast<int>(item.block_cols), n, out->even);
}

// The same for blocks of the col direction, one for each column.
MOIETY_SIMD_CLONES
void inverses(const uint8_t* __restrict words, int64_t n, float* __restrict out) {
  for (int64_t c = 0; c < n; ++c) out[c] = UE8M0::inverse(words[c]);
}
void load_col_factors(const uint8_t* words, int64_t n, TileFactors* out) {
  alignas(64) float factor[kMaxTileCols + 1];
  inverses(words, n, factor);
  out->finite = all_finite(factor, n);
  factor[n] = 1;
  loops::split(factor, n + n % 2, out->even, out->odd);
}

// The owned elements of a row of a tile, with fillers that complete groups of 16 columns and count
// for nothing.
class OwnedRow {
 public:
  // Loads columns [begin, end) of the tile.
  loops::Rows load(const PartialItem& item, const PartialArrays& arrays, const void* x,
                   int64_t begin, int64_t end) {
    const bool round = item.spec.through_bf16 && !arrays.bf16_master;
    const DType dtype = round || arrays.bf16_master ? DType::kBFloat16 : DType::kFloat32;
    const int64_t first = begin / kGroup * kGroup;
    const int64_t n = round_up(end - first, kGroup);
    std::byte* copy = memory_ + (begin - first) * byte_size(dtype, 1);
    if (round) {
      loops::round_to_bf16(static_cast<const float*>(x), end - begin,
                           reinterpret_cast<bf16*>(copy));
    } else if (begin == first && n == end - begin) {
      return {dtype, x, 0, 1, n};
    } else {
      std::memcpy(copy, x, static_cast<size_t>(byte_size(dtype, end - begin)));
    }
    return {dtype, memory_, 0, 1, n};
  }

 private:
  alignas(64) std::byte memory_[kMaxTileCols * sizeof(float)] = {};
};

// Stores the codes of columns [begin, end) as nibbles of a row; `codes` and `out` point to the byte
// of column `begin`. In a byte that is not wholly theirs the other nibble stays.
void store_nibbles(const PartialItem& item, const ByteWriter& writer, int64_t begin, int64_t end,
                   const uint8_t* codes, uint8_t* out) {
  if (begin % 2 != 0) {
    *out = static_cast<uint8_t>((*out & 15) | (*codes & 0xF0));
    ++begin, ++codes, ++out;
  }
  const int64_t pairs = (end - begin) / 2;
  writer.write(out, codes, pairs);
  const bool closes = end == item.cols;
  if ((end - begin) % 2 != 0) {
    out[pairs] = static_cast<uint8_t>((codes[pairs] & 15) | (closes ? 0 : out[pairs] & 0xF0));
  }
  if (!closes) return;
  const int64_t written = (end + 1) / 2;
  std::fill_n(out + (written - begin / 2), item.pitch - written, uint8_t{0});
}

// Casts the rows of a tile.
class TileCaster {
 public:
  TileCaster(const PartialItem& item, const PartialArrays& arrays, const PartialTile& tile,
             const ByteWriter& writer)
      : item_(item), arrays_(arrays), tile_(tile), writer_(writer) {}

  // Casts row r; `col` is null if there are no codes of columns.
  void cast_row(int64_t r, const TileFactors& row, const TileFactors* col) {
    const OwnedColumns owned = owned_columns(item_, tile_, r);
    if (owned.begin >= owned.end) return;
    const int64_t begin = owned.begin - tile_.col, end = owned.end - tile_.col;
    const int64_t byte = position(item_, r * item_.cols + owned.begin) - origin_;
    const loops::Rows x =
        elements_.load(item_, arrays_, owned_elements(item_, arrays_, r, owned.begin), begin, end);
    const int64_t pair = begin / kGroup * (kGroup / 2), at = begin % kGroup;
    encode(x, {row.even + pair, row.even + pair}, row.finite);
    if (is_fp4(item_.spec.format)) {
      return store_nibbles(item_, writer_, owned.begin, owned.end, codes_ + at / 2,
                           arrays_.row + byte);
    }
    writer_.write(arrays_.row + byte, codes_ + at, end - begin);
    if (!col) return;
    encode(x, {col->even + pair, col->odd + pair}, col->finite);
    writer_.write(arrays_.col + byte, codes_ + at, end - begin);
  }

 private:
  void encode(const loops::Rows& x, const loops::PairFactors& factors, bool finite) {
    const loops::Known known = !finite                        ? loops::Known::kNothing
                               : has_power_scales(item_.spec) ? loops::Known::kPowers
                                                              : loops::Known::kFinite;
    loops::encode(x.dtype, item_.spec.element, false, known)(x, factors, nullptr, codes_);
  }

  const PartialItem& item_;
  const PartialArrays& arrays_;
  const PartialTile& tile_;
  const ByteWriter& writer_;
  const int64_t origin_ = position(item_, item_.start);
  OwnedRow elements_;
  alignas(64) uint8_t codes_[kMaxTileCols];
};

void cast_tile(const PartialItem& item, const PartialArrays& arrays, const PartialTile& tile,
               const std::byte* reduction, const ByteWriter& writer) {
  TileFactors row, col;
  TileCaster caster(item, arrays, tile, writer);
  const int64_t blocks = ceil_div(tile.cols, item.block_cols);
  if (item.row.size() == 0) {
    const float factor = fp8_tensor_scale(item, arrays, reduction).encode;
    std::fill_n(row.even, kMaxTileCols / 2, factor);
    row.finite = all_finite(&factor, 1) && is_finite(tensor_amax(item, reduction));
  }
  for (int64_t band = tile.row; band < tile.row + tile.rows; band += item.band) {
    const int64_t band_end = std::min(band + item.band, tile.row + tile.rows);
    if (item.want_col) {
      const int64_t first = item.col.offset + band / 32 * item.col.cols + tile.col;
      load_col_factors(reinterpret_cast<const uint8_t*>(reduction + first), tile.cols, &col);
    }
    for (int64_t r0 = band; r0 < band_end; r0 += item.block_rows) {
      if (item.row.size() > 0) {
        const int64_t first = r0 / item.block_rows * item.row.cols + tile.col / item.block_cols;
        load_row_factors(item, reduction, first, blocks, &row);
      }
      for (int64_t r = r0; r < std::min(r0 + item.block_rows, band_end); ++r) {
        caster.cast_row(r, row, item.want_col ? &col : nullptr);
      }
    }
  }
}

// Stores scales [begin, end) of the blocks; returns whether all belong to finite values.
template <class Rule>
MOIETY_INLINE bool store_piece(const Rule& rule, const PartialBlocks& blocks, int64_t begin,
                               int64_t end, const std::byte* reduction, void* scales) {
  const auto* __restrict words =
      reinterpret_cast<const typename Rule::Word*>(reduction + blocks.offset);
  auto* __restrict out = static_cast<typename Rule::Stored*>(scales);
  uint32_t bad = 0;
  for (int64_t b = begin; b < end; ++b) {
    out[b] = rule.stored(words[b]);
    bad |= rule.finite(words[b]) ? 0u : 1u;
  }
  return bad == 0;
}

MOIETY_SIMD_CLONES
bool store_scales(const PartialItem& item, const PartialArrays& arrays, const PartialScales& piece,
                  const std::byte* reduction) {
  bool finite = true;
  with_rule(
      item, reduction, [&](const auto& rule) __attribute__((always_inline)) {
        finite =
            piece.col
                ? store_piece(rule, item.col, piece.begin, piece.end, reduction, arrays.col_scales)
                : store_piece(rule, item.row, piece.begin, piece.end, reduction, arrays.row_scales);
      });
  return finite;
}

void flag_non_finite(const PartialArrays& arrays) {
  if (!arrays.flags) return;
  std::atomic_ref<uint32_t>(*arrays.flags).fetch_or(kFlagNonFinite, std::memory_order_relaxed);
}

// Stores amax and scale of the tensor as a whole.
void store_tensor_scale(const PartialItem& item, const PartialArrays& arrays,
                        const std::byte* reduction) {
  if (arrays.tensor_scale) {
    arrays.tensor_scale[0] = tensor_decode_scale(item, arrays, reduction);
    if (item.want_col) arrays.tensor_scale[1] = 1.0f;
  }
  if (item.tensor_word < 0) return;
  const float amax = tensor_amax(item, reduction);
  arrays.amax[0] = amax;
  if (item.delayed && abs_bits(amax) > abs_bits(*arrays.step_amax)) *arrays.step_amax = amax;
  if (!is_finite(amax)) flag_non_finite(arrays);
}

}  // namespace

void partial_cast_cpu(const PartialCastTable::Impl& table, const std::byte* reduction) {
  const PartialCastPlan::Impl& plan = *table.plan;
  const auto items = static_cast<int64_t>(plan.items.size());
  parallel_for(items, kItemGrain, [&](int64_t begin, int64_t end) {
    const IeeeScope ieee;
    for (int64_t i = begin; i < end; ++i) {
      store_tensor_scale(plan.items[i], table.arrays[i], reduction);
    }
  });
  const auto pieces = static_cast<int64_t>(plan.scales.size());
  const auto tiles = static_cast<int64_t>(plan.tiles.size());
  int64_t elements = 0;
  for (const PartialItem& item : plan.items) elements += item.end - item.start;
  const ByteWriter writer(elements);
  parallel_tasks(tiles + pieces, [&](int64_t i) {
    const IeeeScope ieee;
    if (i < tiles) {
      const PartialTile& tile = plan.tiles[i];
      const PartialItem& item = plan.items[tile.item];
      const PartialArrays& arrays = table.arrays[tile.item];
      cast_tile(item, arrays, tile, reduction, writer);
      ByteWriter::finish();
    } else {
      const PartialScales& piece = plan.scales[i - tiles];
      const PartialArrays& arrays = table.arrays[piece.item];
      if (!store_scales(plan.items[piece.item], arrays, piece, reduction)) flag_non_finite(arrays);
    }
  });
}

}  // namespace moiety::quant::detail
