#include "moiety/formats/quantized.h"

#include <cmath>
#include <string>

#include "moiety/base/integer.h"

namespace moiety {
namespace {

struct NamedFormat {
  Format format;
  const char* name;
};
constexpr NamedFormat kFormats[] = {
    {Format::kFp8Tensor, "fp8_tensor"},
    {Format::kFp8Block1x128, "fp8_block_1x128"},
    {Format::kFp8Block128x128, "fp8_block_128x128"},
    {Format::kMxfp8, "mxfp8"},
    {Format::kMxfp8Tile32, "mxfp8_tile32"},
    {Format::kNvfp4, "nvfp4"},
    {Format::kNvfp4Tile16, "nvfp4_tile16"},
};

ArraySpec matrix(DType dtype, int64_t rows, int64_t cols) { return {dtype, 2, {rows, cols}}; }
ArraySpec vector(DType dtype, int64_t n) { return {dtype, 1, {n, 0}}; }

DType scale_type(Format format) {
  return is_fp4(format) ? DType::kE4M3 : is_mxfp8(format) ? DType::kUE8M0 : DType::kFloat32;
}

// The array of codes of `rows` rows with `cols` elements each.
ArraySpec data_array(const QuantSpec& spec, int64_t rows, int64_t cols) {
  return is_fp4(spec.format) ? matrix(DType::kUInt8, rows, 8 * ceil_div(cols, 16))
                             : matrix(spec.element, rows, cols);
}

ArraySpec scale_array(Format format, int64_t rows, int64_t cols) {
  const BlockShape block = block_shape(format);
  return matrix(scale_type(format), ceil_div(rows, block.rows), ceil_div(cols, block.cols));
}

// `col_rows` is the number of rows of X as the col arrays count them.
QuantizedSizes array_sizes(const QuantSpec& spec, int64_t rows, int64_t cols, int64_t col_rows,
                           Directions wanted) {
  const Format format = spec.format;
  const bool tile = is_tile(format);
  const bool shared_data = format == Format::kMxfp8Tile32;
  QuantizedSizes out;
  if (wanted.row || shared_data) out.row_data = data_array(spec, rows, cols);
  if (format != Format::kFp8Tensor && (wanted.row || tile)) {
    out.row_scales = scale_array(format, rows, cols);
  }
  if (!wanted.col) return out;
  if (format == Format::kMxfp8) {
    out.col_data = data_array(spec, col_rows, cols);
    out.col_scales = matrix(DType::kUE8M0, ceil_div(col_rows, 32), cols);
    return out;
  }
  if (!shared_data) out.col_data = data_array(spec, cols, col_rows);
  if (format != Format::kFp8Tensor && !tile) out.col_scales = scale_array(format, cols, col_rows);
  return out;
}

void check_size(const char* operation, const QuantSpec& spec, int64_t rows, int64_t cols,
                Directions wanted) {
  check_spec(operation, spec);
  MOIETY_CHECK(rows >= 0 && cols >= 0, "{}: shape [{}, {}]", operation, rows, cols);
  if (spec.row_scaled && wanted.col) {
    fail(ErrorKind::kUnsupported, "{}: row_scaled has no col direction: its columns mix scales",
         operation);
  }
}

void check_array(const char* operation, const char* argument, const TensorView& x,
                 const ArraySpec& expected, const QuantizedView& view) {
  if (!x.defined()) return;
  MOIETY_CHECK(expected.dims > 0, "{}: {} is {}, but {} has no such array", operation, argument,
               x.describe(), name(view.spec.format));
  if (expected.dims == 2) {
    check_tensor(operation, argument, x, expected.dtype, {expected.sizes[0], expected.sizes[1]});
  } else {
    check_tensor(operation, argument, x, expected.dtype, {expected.sizes[0]});
  }
  MOIETY_CHECK(x.contiguous(), "{}: {} is {}, expected no gaps", operation, argument, x.describe());
  MOIETY_CHECK(x.device() == view.tensor_scale.device() || !view.tensor_scale.defined(),
               "{}: {} and tensor_scale are on different devices", operation, argument);
}

void check_arrays(const char* operation, const QuantizedView& view, const QuantizedSizes& sizes,
                  int64_t flags) {
  check_array(operation, "row_data", view.row_data, sizes.row_data, view);
  check_array(operation, "col_data", view.col_data, sizes.col_data, view);
  if (view.layout == ScaleLayout::kCompact) {
    check_array(operation, "row_scales", view.row_scales, sizes.row_scales, view);
    check_array(operation, "col_scales", view.col_scales, sizes.col_scales, view);
  }
  check_array(operation, "amax", view.amax, sizes.amax, view);
  check_array(operation, "tensor_scale", view.tensor_scale, sizes.tensor_scale, view);
  check_array(operation, "flags", view.flags, vector(DType::kUInt32, flags), view);
}

// The directions that a tensor of this QuantSpec can have.
Directions all_directions(const QuantSpec& spec) { return {true, !spec.row_scaled}; }

}  // namespace

const char* name(Format format) {
  for (const NamedFormat& f : kFormats) {
    if (f.format == format) return f.name;
  }
  return "an unknown format";
}

std::optional<Format> format_of(std::string_view name) {
  for (const NamedFormat& f : kFormats) {
    if (name == f.name) return f.format;
  }
  return std::nullopt;
}

const char* name(ScaleLayout layout) {
  switch (layout) {
    case ScaleLayout::kCompact:
      return "compact";
    case ScaleLayout::kSm100Swizzled:
      return "sm100_swizzled";
    case ScaleLayout::kPadded:
      return "padded";
    case ScaleLayout::kSm90MnMajor:
      return "sm90_mn_major";
  }
  return "an unknown layout";
}

QuantSpec QuantSpec::of(Format format) {
  QuantSpec spec;
  spec.format = format;
  spec.element = is_fp4(format) ? DType::kE2M1 : DType::kE4M3;
  spec.pow2_scales = is_fp8_block(format);
  return spec;
}

void check_spec(const char* operation, const QuantSpec& spec) {
  const char* format = name(spec.format);
  const bool fp8_scaled = spec.format == Format::kFp8Tensor || is_fp8_block(spec.format);
  const bool element_fits = is_fp4(spec.format)
                                ? spec.element == DType::kE2M1
                                : spec.element == DType::kE4M3 || spec.element == DType::kE5M2;
  MOIETY_CHECK(element_fits, "{}: elements of {} are {}, expected {}", operation, format,
               name(spec.element), is_fp4(spec.format) ? "e2m1" : "e4m3 or e5m2");
  MOIETY_CHECK(!spec.pow2_scales || fp8_scaled, "{}: pow2_scales with {}, which has other scales",
               operation, format);
  MOIETY_CHECK(spec.amax_floor == 0 || fp8_scaled, "{}: amax_floor {} with {}", operation,
               spec.amax_floor, format);
  MOIETY_CHECK(spec.amax_floor >= 0 && std::isfinite(spec.amax_floor), "{}: amax_floor is {}",
               operation, spec.amax_floor);
  MOIETY_CHECK(!spec.row_scaled || spec.format == Format::kNvfp4, "{}: row_scaled with {}",
               operation, format);
  MOIETY_CHECK(!spec.rht_col || spec.format == Format::kNvfp4, "{}: rht_col with {}", operation,
               format);
  MOIETY_CHECK(!spec.rht_col || !spec.row_scaled,
               "{}: rht_col with row_scaled, which has no col direction", operation);
}

QuantizedSizes quantized_sizes(const QuantSpec& spec, int64_t rows, int64_t cols,
                               Directions wanted) {
  check_size("quantized_sizes", spec, rows, cols, wanted);
  QuantizedSizes out = array_sizes(spec, rows, cols, rows, wanted);
  out.tensor_scale = vector(DType::kFloat32, spec.row_scaled ? rows : 2);
  if (is_tensor_scaled(spec.format)) out.amax = out.tensor_scale;
  return out;
}

QuantizedSizes quantized_grouped_sizes(const QuantSpec& spec, int64_t capacity, int64_t cols,
                                       int64_t experts, Directions wanted) {
  check_size("quantized_grouped_sizes", spec, capacity, cols, wanted);
  MOIETY_CHECK(experts >= 0, "quantized_grouped_sizes: {} experts", experts);
  if (is_tile(spec.format)) {
    fail(ErrorKind::kUnsupported, "quantized_grouped_sizes: {} is for weights, a tensor an expert",
         name(spec.format));
  }
  QuantizedSizes out =
      array_sizes(spec, capacity, cols, grouped_columns(capacity, experts), wanted);
  out.tensor_scale =
      spec.row_scaled ? vector(DType::kFloat32, capacity) : matrix(DType::kFloat32, 2, experts);
  if (is_tensor_scaled(spec.format)) out.amax = out.tensor_scale;
  return out;
}

int64_t grouped_columns(int64_t capacity, int64_t experts) {
  // The bound on blocks of 128: as many groups as possible have one row in a block of their own.
  const int64_t groups = experts < capacity ? experts : capacity;
  return 128 * (groups + (capacity - groups) / 128);
}

void check_quantized(const char* operation, const QuantizedView& view) {
  check_size(operation, view.spec, view.rows, view.cols, {true, false});
  check_arrays(operation, view,
               quantized_sizes(view.spec, view.rows, view.cols, all_directions(view.spec)), 1);
}

void check_quantized_grouped(const char* operation, const QuantizedView& view, int64_t experts) {
  check_size(operation, view.spec, view.rows, view.cols, {true, false});
  check_arrays(
      operation, view,
      quantized_grouped_sizes(view.spec, view.rows, view.cols, experts, all_directions(view.spec)),
      experts);
}

QuantizedTensor::QuantizedTensor(const QuantSpec& spec, int64_t rows, int64_t cols,
                                 Directions wanted, Device device)
    : QuantizedTensor(spec, rows, cols, quantized_sizes(spec, rows, cols, wanted), device) {}

QuantizedTensor::QuantizedTensor(const QuantSpec& spec, int64_t rows, int64_t cols,
                                 const QuantizedSizes& sizes, Device device) {
  // Every array begins at a multiple of 64 bytes, empty ones too.
  const auto padded = [](const ArraySpec& a) {
    return a.dims == 0 ? 0 : (a.bytes() / 64 + 1) * 64;
  };
  const bool grouped = sizes.tensor_scale.dims == 2;
  const ArraySpec flags = vector(DType::kUInt32, grouped ? sizes.tensor_scale.sizes[1] : 1);
  int64_t bytes = 0;
  for (const ArraySpec* a : {&sizes.row_data, &sizes.row_scales, &sizes.col_data, &sizes.col_scales,
                             &sizes.amax, &sizes.tensor_scale, &flags}) {
    bytes += padded(*a);
  }
  memory_ = Buffer(bytes, device, "quantized tensor");
  std::byte* at = memory_.data();
  const auto place = [&](const ArraySpec& a) {
    const TensorView view =
        a.dims == 0 ? TensorView()
                    : TensorView(at, a.dtype, std::span(a.sizes.data(), a.dims), device);
    at += padded(a);
    return view;
  };
  view_.spec = spec;
  view_.rows = rows;
  view_.cols = cols;
  view_.row_data = place(sizes.row_data);
  view_.row_scales = place(sizes.row_scales);
  view_.col_data = place(sizes.col_data);
  view_.col_scales = place(sizes.col_scales);
  view_.amax = place(sizes.amax);
  view_.tensor_scale = place(sizes.tensor_scale);
  view_.flags = place(flags);
}

}  // namespace moiety
