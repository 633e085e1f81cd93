// The common part of the implementations of the partial cast: geometry of the items, offsets in the
// reduction buffer, and the pieces of work of both phases.
#pragma once

#include <vector>

#include "moiety/base/host_device.h"
#include "moiety/quant/partial_cast.h"

namespace moiety::quant::detail {

// The scales of one direction of an item, one for each block of block_rows x block_cols elements:
// block rows x block columns of them, row-major.
struct PartialBlocks {
  int64_t rows = 0, cols = 0;
  int64_t offset = -1;  // of the first word (int32) or byte (MXFP8) in the reduction buffer
  int64_t begin = 0;    // the scales that this rank writes: all or, if the shards are
  int64_t end = 0;      // aligned, those of its rows
  MOIETY_HD_INLINE constexpr int64_t size() const { return rows * cols; }
};

// An item as a matrix whose rows are cut into blocks. kFp8Tensor has no scales of blocks and its
// codes lie in flat order, so it counts as rows of kFlatCols elements, the last of which may be
// short.
struct PartialItem {
  QuantSpec spec;
  bool delayed = false, want_col = false;
  int64_t rows = 0, cols = 0, pitch = 0;  // pitch: bytes of a row of codes
  int64_t start = 0, end = 0;             // owned elements
  int64_t block_rows = 1, block_cols = 1;
  int64_t band = 1;          // rows of which tiles are made: whole blocks of both directions
  int64_t tensor_word = -1;  // offset of the tensor's amax in the reduction buffer
  PartialBlocks row, col;    // col: only kMxfp8, blocks of 32 x 1
};
inline constexpr int64_t kFlatCols = 1024, kFlatBand = 64;

// The byte of element e in the row data (its nibble is the parity of its column).
MOIETY_HD_INLINE constexpr int64_t position(const PartialItem& item, int64_t e) {
  const int64_t r = e / item.cols, c = e % item.cols;
  return r * item.pitch + (is_fp4(item.spec.format) ? c / 2 : c);
}

// A piece of the matrix that holds owned elements: whole bands and whole blocks, so that each block
// lies in one tile. Tiles are cut at the edges of the matrix.
struct PartialTile {
  int32_t item;
  int64_t row, col, rows, cols;
};
inline constexpr int64_t kMaxTileCols = 1024;

// The size of tiles: the most columns, the approximate number of elements, the most rows of a band.
// kStrips is for a warp of a GPU; blocks with more rows lie in several strips.
struct PartialTiling {
  int64_t cols, elements, band;
};
inline constexpr int kStripRows = 32, kStripCols = 128;
inline constexpr PartialTiling kTiles{kMaxTileCols, 64 << 10, 128};
inline constexpr PartialTiling kStrips{kStripCols, kStripRows* kStripCols, kStripRows};

// A range of the scales that this rank writes.
struct PartialScales {
  int32_t item;
  bool col;
  int64_t begin, end;
};

// The owned columns of row r of a tile; empty if begin >= end.
struct OwnedColumns {
  int64_t begin, end;
};
MOIETY_HD_INLINE constexpr OwnedColumns owned_columns(const PartialItem& item,
                                                      const PartialTile& tile, int64_t r) {
  const int64_t first = item.start - r * item.cols, last = item.end - r * item.cols;
  const int64_t end = tile.col + tile.cols;
  return {first > tile.col ? first : tile.col, last < end ? last : end};
}

// The arrays of an item; row and col point to the byte of element `start`.
struct PartialArrays {
  const void* master = nullptr;
  bool bf16_master = false;
  uint8_t* row = nullptr;
  uint8_t* col = nullptr;
  void* row_scales = nullptr;
  uint8_t* col_scales = nullptr;
  float* amax = nullptr;
  float* tensor_scale = nullptr;
  uint32_t* flags = nullptr;
  const float* delayed_scale = nullptr;
  const float* delayed_scale_inv = nullptr;
  float* step_amax = nullptr;
};

// The master value of element (r, c), followed by those of the next elements.
MOIETY_HD_INLINE const void* owned_elements(const PartialItem& item, const PartialArrays& arrays,
                                            int64_t r, int64_t c) {
  const int64_t i = r * item.cols + c - item.start;
  return static_cast<const std::byte*>(arrays.master) + (arrays.bf16_master ? 2 : 4) * i;
}

}  // namespace moiety::quant::detail

namespace moiety::quant {

struct PartialCastPlan::Impl {
  std::vector<PartialCastItem> given;
  bool aligned = false;
  std::vector<detail::PartialItem> items;
  std::vector<detail::PartialTile> tiles;
  std::vector<detail::PartialScales> scales;
  std::vector<PartialReduction> reductions;
  int64_t reduction_bytes = 0;
};

namespace detail {
struct PartialGpuTable;
}

struct PartialCastTable::Impl {
  const PartialCastPlan::Impl* plan = nullptr;
  std::vector<detail::PartialArrays> arrays;
  Device place = {};                                   // place of all arrays
  std::shared_ptr<const detail::PartialGpuTable> gpu;  // set if that is a GPU
};

namespace detail {

// Adds the tiles of an item, whose number is `index`.
void add_tiles(std::vector<PartialTile>& out, const PartialItem& item, int32_t index,
               const PartialTiling& tiling);

// partial_amax zeroes `reduction`.
void partial_amax_ref(const PartialCastTable::Impl& table, std::byte* reduction);
void partial_amax_cpu(const PartialCastTable::Impl& table, std::byte* reduction);
void partial_cast_ref(const PartialCastTable::Impl& table, const std::byte* reduction);
void partial_cast_cpu(const PartialCastTable::Impl& table, const std::byte* reduction);

}  // namespace detail
}  // namespace moiety::quant
