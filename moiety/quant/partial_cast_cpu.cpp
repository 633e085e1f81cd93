// Threads take tiles and pieces of scales. A tile has a scale for every column side by side, so
// that one loop serves blocks of all shapes.
#include <algorithm>
#include <atomic>

#include "moiety/base/parallel.h"
#include "moiety/quant/ieee_scope.h"
#include "moiety/quant/partial_cast_scales.h"

namespace moiety::quant::detail {
namespace {

constexpr int64_t kItemGrain = 64;

template <int kWidth>
MOIETY_INLINE void spread(const float* __restrict scale, int64_t blocks, float* __restrict out) {
  for (int64_t b = 0; b < blocks; ++b) {
    for (int i = 0; i < kWidth; ++i) out[b * kWidth + i] = scale[b];
  }
}

template <class Rule>
MOIETY_INLINE void spread_scales(const Rule& rule, const std::byte* at, int64_t blocks,
                                 int64_t width, float* __restrict out) {
  const auto* words = reinterpret_cast<const typename Rule::Word*>(at);
  alignas(64) float scale[kMaxTileCols / 16];
  for (int64_t b = 0; b < blocks; ++b) scale[b] = rule.encode(words[b]);
  if (width == 16) {
    spread<16>(scale, blocks, out);
  } else if (width == 32) {
    spread<32>(scale, blocks, out);
  } else {
    spread<128>(scale, blocks, out);
  }
}

// What codes are multiplied with: out[c] for the columns of `n` blocks, the first of which is
// number `first`.
MOIETY_SIMD_CLONES
void load_scales(const PartialItem& item, const std::byte* reduction, int64_t first, int64_t n,
                 float* out) {
  with_rule(
      item, reduction, [&]<class Rule>(const Rule& rule) __attribute__((always_inline)) {
        const std::byte* at =
            reduction + item.row.offset + first * int64_t{sizeof(typename Rule::Word)};
        spread_scales(rule, at, n, item.block_cols, out);
      });
}

// The same for blocks of the col direction, one for each column.
MOIETY_SIMD_CLONES
void load_col_scales(const uint8_t* __restrict words, int64_t n, float* __restrict out) {
  for (int64_t c = 0; c < n; ++c) out[c] = UE8M0::inverse(words[c]);
}

template <class F, class T, bool kThroughBf16>
MOIETY_INLINE void encode_row(const void* row, const float* __restrict scale, int64_t n,
                              uint8_t* __restrict codes) {
  const T* __restrict x = static_cast<const T*>(row);
  for (int64_t i = 0; i < n; ++i) {
    const float value = static_cast<float>(x[i]);
    const float rounded = kThroughBf16 ? static_cast<float>(bf16(value)) : value;
    codes[i] = F::encode(rounded * scale[i]);
  }
}

using EncodeRow = void (*)(const void* row, const float* scale, int64_t n, uint8_t* codes);

MOIETY_SIMD_CLONES
void float_to_e4m3(const void* row, const float* scale, int64_t n, uint8_t* codes) {
  encode_row<E4M3, float, false>(row, scale, n, codes);
}
MOIETY_SIMD_CLONES
void float_through_bf16_to_e4m3(const void* row, const float* scale, int64_t n, uint8_t* codes) {
  encode_row<E4M3, float, true>(row, scale, n, codes);
}
MOIETY_SIMD_CLONES
void bf16_to_e4m3(const void* row, const float* scale, int64_t n, uint8_t* codes) {
  encode_row<E4M3, bf16, false>(row, scale, n, codes);
}
MOIETY_SIMD_CLONES
void float_to_e5m2(const void* row, const float* scale, int64_t n, uint8_t* codes) {
  encode_row<E5M2, float, false>(row, scale, n, codes);
}
MOIETY_SIMD_CLONES
void float_through_bf16_to_e5m2(const void* row, const float* scale, int64_t n, uint8_t* codes) {
  encode_row<E5M2, float, true>(row, scale, n, codes);
}
MOIETY_SIMD_CLONES
void bf16_to_e5m2(const void* row, const float* scale, int64_t n, uint8_t* codes) {
  encode_row<E5M2, bf16, false>(row, scale, n, codes);
}
MOIETY_SIMD_CLONES
void float_to_e2m1(const void* row, const float* scale, int64_t n, uint8_t* codes) {
  encode_row<E2M1, float, false>(row, scale, n, codes);
}
MOIETY_SIMD_CLONES
void float_through_bf16_to_e2m1(const void* row, const float* scale, int64_t n, uint8_t* codes) {
  encode_row<E2M1, float, true>(row, scale, n, codes);
}
MOIETY_SIMD_CLONES
void bf16_to_e2m1(const void* row, const float* scale, int64_t n, uint8_t* codes) {
  encode_row<E2M1, bf16, false>(row, scale, n, codes);
}

// A bf16 master is not rounded again: only NaNs would change, and all of them have one code.
EncodeRow choose_encode(const PartialItem& item, const PartialArrays& arrays) {
  const auto choose = [&](EncodeRow plain, EncodeRow through, EncodeRow from_bf16) {
    return arrays.bf16_master ? from_bf16 : item.spec.through_bf16 ? through : plain;
  };
  switch (item.spec.element) {
    case DType::kE2M1:
      return choose(float_to_e2m1, float_through_bf16_to_e2m1, bf16_to_e2m1);
    case DType::kE5M2:
      return choose(float_to_e5m2, float_through_bf16_to_e5m2, bf16_to_e5m2);
    default:
      return choose(float_to_e4m3, float_through_bf16_to_e4m3, bf16_to_e4m3);
  }
}

MOIETY_SIMD_CLONES
void pack_pairs(const uint8_t* __restrict codes, int64_t pairs, uint8_t* __restrict out) {
  for (int64_t i = 0; i < pairs; ++i) out[i] = E2M1::pack(codes[2 * i], codes[2 * i + 1]);
}

// Codes of columns [begin, end) into the nibbles of a row, `out` the byte of column `begin`; of a
// byte that is not wholly theirs the other nibble stays.
void store_nibbles(const PartialItem& item, int64_t begin, int64_t end, const uint8_t* codes,
                   uint8_t* out) {
  if (begin % 2 != 0) {
    *out = E2M1::pack(*out & 15, *codes);
    ++begin, ++codes, ++out;
  }
  const int64_t pairs = (end - begin) / 2;
  pack_pairs(codes, pairs, out);
  const bool closes = end == item.cols;
  if ((end - begin) % 2 != 0) {
    out[pairs] = E2M1::pack(codes[2 * pairs], closes ? 0 : out[pairs] >> 4);
  }
  if (!closes) return;
  const int64_t written = (end + 1) / 2;
  std::fill_n(out + (written - begin / 2), item.pitch - written, uint8_t{0});
}

void cast_tile(const PartialItem& item, const PartialArrays& arrays, const PartialTile& tile,
               const std::byte* reduction) {
  // Blocks may reach past the tile, at most to the next multiple of 128.
  alignas(64) float row_scale[kMaxTileCols], col_scale[kMaxTileCols];
  alignas(64) uint8_t codes[kMaxTileCols];
  const EncodeRow encode = choose_encode(item, arrays);
  const int64_t origin = position(item, item.start);
  const int64_t blocks = (tile.cols + item.block_cols - 1) / item.block_cols;
  if (item.row.size() == 0) {
    std::fill_n(row_scale, tile.cols, fp8_tensor_scale(item, arrays, reduction).encode);
  }
  for (int64_t band = tile.row; band < tile.row + tile.rows; band += item.band) {
    const int64_t band_end = std::min(band + item.band, tile.row + tile.rows);
    if (item.want_col) {
      const int64_t first = item.col.offset + band / 32 * item.col.cols + tile.col;
      load_col_scales(reinterpret_cast<const uint8_t*>(reduction + first), tile.cols, col_scale);
    }
    for (int64_t r0 = band; r0 < band_end; r0 += item.block_rows) {
      if (item.row.size() > 0) {
        const int64_t first = r0 / item.block_rows * item.row.cols + tile.col / item.block_cols;
        load_scales(item, reduction, first, blocks, row_scale);
      }
      for (int64_t r = r0; r < std::min(r0 + item.block_rows, band_end); ++r) {
        const OwnedColumns owned = owned_columns(item, tile, r);
        if (owned.begin >= owned.end) continue;
        const int64_t n = owned.end - owned.begin, at = owned.begin - tile.col;
        const void* x = owned_elements(item, arrays, r, owned.begin);
        const int64_t byte = position(item, r * item.cols + owned.begin) - origin;
        if (is_fp4(item.spec.format)) {
          encode(x, row_scale + at, n, codes);
          store_nibbles(item, owned.begin, owned.end, codes, arrays.row + byte);
          continue;
        }
        encode(x, row_scale + at, n, arrays.row + byte);
        if (item.want_col) encode(x, col_scale + at, n, arrays.col + byte);
      }
    }
  }
}

// Scales [begin, end) of the blocks; whether all of them are of finite values.
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

// amax and scale of the tensor as a whole.
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
  parallel_tasks(tiles + pieces, [&](int64_t i) {
    const IeeeScope ieee;
    if (i < tiles) {
      const PartialTile& tile = plan.tiles[i];
      const PartialItem& item = plan.items[tile.item];
      const PartialArrays& arrays = table.arrays[tile.item];
      cast_tile(item, arrays, tile, reduction);
    } else {
      const PartialScales& piece = plan.scales[i - tiles];
      const PartialArrays& arrays = table.arrays[piece.item];
      if (!store_scales(plan.items[piece.item], arrays, piece, reduction)) flag_non_finite(arrays);
    }
  });
}

}  // namespace moiety::quant::detail
