// Tensors in low-precision formats: the formats that exist, and the arrays and bytes of a tensor in
// each (docs/spec/formats.md#arrays; docs/formats.md has a picture of each).
//
// X is a logical matrix of `rows` x `cols`. In the "row" direction, blocks of elements that share a
// scale lie along a row of X. In the "col" direction they lie along a column: that is the row form
// of X transposed. Everything is row-major and compact, without padding except the block padding
// named here.
//
//    format             row data         row scales               col data         col scales
//    kFp8Tensor         [M][K]           -                        [K][M]           -
//    kFp8Block1x128     [M][K]           f32 [M][K/128]           [K][M]           f32 [K][M/128]
//    kFp8Block128x128   [M][K]           f32 [M/128][K/128]       [K][M]           the row scales
//    kMxfp8             [M][K]           ue8m0 [M][K/32]          [M][K]           ue8m0 [M/32][K]
//    kMxfp8Tile32       [M][K]           ue8m0 [M/32][K/32]       the row data     the row scales
//    kNvfp4             [M][8*(K/16)]    e4m3 [M][K/16]           [K][8*(M/16)]    e4m3 [K][M/16]
//    kNvfp4Tile16       [M][8*(K/16)]    e4m3 [M/16][K/16]        [K][8*(M/16)]    the row scales
//
// Divisions round up. FP8 data have dtype kE4M3 or kE5M2. NVFP4 data are kUInt8, two elements a
// byte, the first in the low nibble; a row is a whole number of blocks and pad nibbles are 0.
// float32 scales are decode scales: value = code * scale.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "moiety/base/buffer.h"
#include "moiety/base/tensor_view.h"

namespace moiety {

enum class Format : uint8_t {
  kFp8Tensor,        // one scale per tensor, current or delayed
  kFp8Block1x128,    // 1x128, activations and gradients
  kFp8Block128x128,  // 128x128, weights
  kMxfp8,            // 1x32 (OCP microscaling formats, 1.0)
  kMxfp8Tile32,      // 32x32, weights: one scale for both directions
  kNvfp4,            // 1x16, activations and gradients
  kNvfp4Tile16,      // 16x16, weights
};
// The format's name: "fp8_tensor", "fp8_block_1x128", "fp8_block_128x128", "mxfp8", "mxfp8_tile32",
// "nvfp4" or "nvfp4_tile16". format_of is the inverse.
const char* name(Format format);
std::optional<Format> format_of(std::string_view name);

// Elements of X that share a scale in the row direction; {0, 0} for kFp8Tensor.
struct BlockShape {
  int rows, cols;
};
constexpr BlockShape block_shape(Format format) {
  switch (format) {
    case Format::kFp8Tensor:
      return {0, 0};
    case Format::kFp8Block1x128:
      return {1, 128};
    case Format::kFp8Block128x128:
      return {128, 128};
    case Format::kMxfp8:
      return {1, 32};
    case Format::kMxfp8Tile32:
      return {32, 32};
    case Format::kNvfp4:
      return {1, 16};
    case Format::kNvfp4Tile16:
      return {16, 16};
  }
  return {0, 0};
}
// Whether one scale serves a square of elements.
constexpr bool is_tile(Format format) { return block_shape(format).rows > 1; }
// Whether both directions have the same codes: a scale serves squares or the whole tensor.
constexpr bool has_one_coding(Format format) {
  return is_tile(format) || format == Format::kFp8Tensor;
}
constexpr bool is_fp4(Format format) {
  return format == Format::kNvfp4 || format == Format::kNvfp4Tile16;
}
constexpr bool is_mxfp8(Format format) {
  return format == Format::kMxfp8 || format == Format::kMxfp8Tile32;
}
constexpr bool is_fp8_block(Format format) {
  return format == Format::kFp8Block1x128 || format == Format::kFp8Block128x128;
}
// Whether scales depend on the amax of the whole tensor, which is then kept.
constexpr bool is_tensor_scaled(Format format) {
  return format == Format::kFp8Tensor || is_fp4(format);
}

enum class Rounding : uint8_t { kNearest, kStochastic };
enum class Direction : uint8_t { kRow, kCol };
struct Directions {
  bool row = true;
  bool col = false;
};

// The order of scales in memory that a GEMM wants (docs/spec/formats.md#scale-layouts). kCompact is
// the order in which scales are communicated and saved.
enum class ScaleLayout : uint8_t { kCompact, kSm100Swizzled, kPadded, kSm90MnMajor };
const char* name(ScaleLayout layout);

// The way in which a tensor was or is to be quantized. GEMMs refuse operands whose specs do not fit
// each other (rht_signs, block shapes).
struct QuantSpec {
  Format format = Format::kFp8Block1x128;
  DType element = DType::kE4M3;  // kE4M3 or kE5M2; kE2M1 for NVFP4
  Rounding rounding = Rounding::kNearest;
  bool pow2_scales = false;     // FP8: scales are powers of two
  bool row_scaled = false;      // kNvfp4, row direction only: each row is a tensor of its own
  bool rht_col = false;         // kNvfp4: random Hadamard transform of the col direction
  bool through_bf16 = true;     // partial_cast: master values are rounded to bf16 first
  uint16_t rht_signs = 0xD7E8;  // bit i: element i of 16 changes its sign
  float amax_floor = 0;         // FP8: a smaller amax counts as this

  // The format with its usual options: scales of FP8 blocks are powers of two.
  static QuantSpec of(Format format);
  friend bool operator==(const QuantSpec&, const QuantSpec&) = default;
};
// Whether the scales of blocks are powers of two.
constexpr bool has_power_scales(const QuantSpec& spec) {
  return is_mxfp8(spec.format) || (is_fp8_block(spec.format) && spec.pow2_scales);
}
// Throws Error(InvalidArgument) naming `operation` if the options do not go together.
void check_spec(const char* operation, const QuantSpec& spec);

// A view of a tensor in a format; it owns nothing. Arrays that are not asked for or not there are
// undefined: an operation produces the directions whose data are defined. In tile formats, col data
// and scales that are the same as the row's stay undefined; a view of the col direction alone then
// has row_scales (and for kMxfp8Tile32 row_data too).
//
// amax and tensor_scale are float32: [2] with index 0 row and 1 col, [2][E] in a grouped tensor,
// [M] if row_scaled. tensor_scale is the decode scale, 1 in formats without one; amax is undefined
// in formats that are not tensor-scaled. flags are optional, uint32 [1] or [E]; bits are only ever
// added.
struct QuantizedView {
  QuantSpec spec;
  int64_t rows = 0, cols = 0;
  ScaleLayout layout = ScaleLayout::kCompact;
  TensorView row_data, row_scales, col_data, col_scales, amax, tensor_scale, flags;
};
inline constexpr uint32_t kFlagNonFinite = 1;  // the input held inf or NaN
// a scale did not survive a conversion of layout or format
inline constexpr uint32_t kFlagUnrepresentable = 2;

// Shape and dtype of one array of a quantized tensor; dims is 0 if the format has no such array.
struct ArraySpec {
  DType dtype = DType::kUInt8;
  int dims = 0;
  std::array<int64_t, 2> sizes{};
  int64_t bytes() const {
    return dims == 0 ? 0 : byte_size(dtype, sizes[0] * (dims > 1 ? sizes[1] : 1));
  }
};
struct QuantizedSizes {
  ArraySpec row_data, row_scales, col_data, col_scales, amax, tensor_scale;
};
// The arrays of a matrix of rows x cols, with compact scales. Arrays of a direction that is not
// asked for have dims 0.
QuantizedSizes quantized_sizes(const QuantSpec& spec, int64_t rows, int64_t cols,
                               Directions wanted);
// The arrays of rows [capacity] x cols that belong to `experts` groups (quant/quantize.h,
// quantize_grouped).
QuantizedSizes quantized_grouped_sizes(const QuantSpec& spec, int64_t capacity, int64_t cols,
                                       int64_t experts, Directions wanted);
// Columns of the col data of a grouped tensor, enough for any split of `capacity` rows: each group
// begins at a multiple of 128.
int64_t grouped_columns(int64_t capacity, int64_t experts);

// Throws Error(InvalidArgument) naming `operation` unless the arrays of `view` that are defined
// have the dtypes and shapes of quantized_sizes, lie on one device and are contiguous.
void check_quantized(const char* operation, const QuantizedView& view);
// Checks a grouped tensor against quantized_grouped_sizes; view.rows is the capacity, flags are
// [experts].
void check_quantized_grouped(const char* operation, const QuantizedView& view, int64_t experts);

// A quantized tensor that owns its arrays, flags included; all are zero at first.
class QuantizedTensor {
 public:
  QuantizedTensor() = default;
  QuantizedTensor(const QuantSpec& spec, int64_t rows, int64_t cols, Directions wanted,
                  Device device = {});
  QuantizedTensor(const QuantSpec& spec, int64_t rows, int64_t cols, const QuantizedSizes& sizes,
                  Device device = {});

  const QuantizedView& view() const { return view_; }
  operator const QuantizedView&() const { return view_; }

 private:
  Buffer memory_;
  QuantizedView view_;
};

}  // namespace moiety
