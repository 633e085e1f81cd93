#include "moiety/quant/scale_layout.h"

#include "moiety/base/gpu.h"
#include "moiety/base/trace.h"
#include "moiety/quant/scale_layout_job.h"

namespace moiety::quant {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
int64_t up(int64_t a, int64_t b) { return b * ceil_div(a, b); }

// The compact scales of a direction. With `need_data` false only the shape is asked for.
ScaleMatrix scale_matrix(const char* operation, const QuantizedView& view, Direction direction,
                         bool need_data) {
  check_quantized(operation, view);
  const Format format = view.spec.format;
  const BlockShape block = block_shape(format);
  if (format == Format::kFp8Tensor) {
    fail(ErrorKind::kUnsupported, "{}: {} has no block scales", operation, name(format));
  }
  const bool row = direction == Direction::kRow, tile = is_tile(format);
  MOIETY_CHECK(row || !view.spec.row_scaled, "{}: row_scaled has no col direction", operation);
  ScaleMatrix out;
  out.rows = row ? view.rows : view.cols;
  out.cols = ceil_div(row ? view.cols : view.rows, block.cols);
  out.width = is_fp8_block(format) ? 4 : 1;
  out.row_block = tile ? block.rows : 1;
  if (row || (!tile && format != Format::kMxfp8)) {
    out.row_stride = out.cols;
  } else {
    out.row_stride = 1;
    out.col_stride = tile ? ceil_div(view.cols, block.cols) : view.cols;
  }
  if (!need_data) return out;
  const TensorView& scales = row || tile ? view.row_scales : view.col_scales;
  MOIETY_CHECK(scales.defined(), "{}: the view has no {} scales", operation,
               row || tile ? "row" : "col");
  MOIETY_CHECK(view.layout == ScaleLayout::kCompact, "{}: scales are {}, expected compact",
               operation, name(view.layout));
  out.data = static_cast<uint8_t*>(scales.raw());
  return out;
}

void check_layout(const char* operation, const QuantizedView& view, ScaleLayout layout) {
  MOIETY_CHECK(layout != ScaleLayout::kCompact, "{}: layout is compact, expected another one",
               operation);
  const bool of_floats = layout == ScaleLayout::kSm90MnMajor;
  if (of_floats != is_fp8_block(view.spec.format)) {
    fail(ErrorKind::kUnsupported, "{}: {} is a layout of {}, {} has others", operation,
         name(layout), of_floats ? "float32 scales" : "byte scales", name(view.spec.format));
  }
}

// Checks that the scales are on the stream's device.
void check_place(const char* operation, const QuantizedView& view, Direction direction,
                 const Stream& stream) {
  const bool row = direction == Direction::kRow || is_tile(view.spec.format);
  const TensorView& scales = row ? view.row_scales : view.col_scales;
  require_device(operation, scales.device());
  check_device(operation, row ? "row_scales" : "col_scales", scales, stream);
  check_device(operation, "flags", view.flags, stream);
}

bool on_gpu(const Stream& stream) { return stream.device().type == DeviceType::kCuda; }

ArraySpec array_of(const ScaleMatrix& m, ScaleLayout layout) {
  switch (layout) {
    case ScaleLayout::kSm100Swizzled:
      return {DType::kUInt8, 1, {layout_scales(layout, m.rows, m.cols), 0}};
    case ScaleLayout::kPadded:
      return {DType::kUInt8, 2, {up(m.rows, 128), up(m.cols, 4)}};
    default:
      return {DType::kFloat32, 2, {m.cols, up(m.rows, 4)}};
  }
}

void check_scales(const char* operation, const char* argument, const TensorView& x,
                  const ArraySpec& expected) {
  if (expected.dims == 1) {
    check_tensor(operation, argument, x, expected.dtype, {expected.sizes[0]});
  } else {
    check_tensor(operation, argument, x, expected.dtype, {expected.sizes[0], expected.sizes[1]});
  }
  MOIETY_CHECK(x.contiguous(), "{}: {} is {}, expected no gaps", operation, argument, x.describe());
}

}  // namespace

int64_t layout_scales(ScaleLayout layout, int64_t rows, int64_t cols) {
  return layout == ScaleLayout::kSm90MnMajor ? cols * up(rows, 4) : up(rows, 128) * up(cols, 4);
}

ArraySpec scale_layout_size(const QuantizedView& view, Direction direction, ScaleLayout layout) {
  check_layout("scale_layout_size", view, layout);
  return array_of(scale_matrix("scale_layout_size", view, direction, false), layout);
}

void convert_scales(const QuantizedView& view, Direction direction, ScaleLayout layout,
                    TensorView out, Stream stream) {
  check_layout("convert_scales", view, layout);
  const ScaleMatrix in = scale_matrix("convert_scales", view, direction, true);
  check_scales("convert_scales", "out", out, array_of(in, layout));
  check_place("convert_scales", view, direction, stream);
  check_device("convert_scales", "out", out, stream);
  auto* to = static_cast<uint8_t*>(out.raw());
  if (on_gpu(stream)) return convert_scales_cuda(in, layout, to, stream);
  stream.run([in, layout, to] {
    const TraceSpan span(TraceLane::kCompute, "convert_scales", {{"rows", in.rows}});
    convert_scales_cpu(in, layout, to);
  });
}

void compact_scales(TensorView scales, ScaleLayout layout, const QuantizedView& view,
                    Direction direction, Stream stream) {
  check_layout("compact_scales", view, layout);
  if (is_tile(view.spec.format)) {
    fail(ErrorKind::kUnsupported, "compact_scales: scales of {} were expanded on the way",
         name(view.spec.format));
  }
  const ScaleMatrix out = scale_matrix("compact_scales", view, direction, true);
  check_scales("compact_scales", "scales", scales, array_of(out, layout));
  check_place("compact_scales", view, direction, stream);
  check_device("compact_scales", "scales", scales, stream);
  const auto* from = static_cast<const uint8_t*>(scales.raw());
  if (on_gpu(stream)) return compact_scales_cuda(from, layout, out, stream);
  stream.run([from, layout, out] { compact_scales_cpu(from, layout, out); });
}

void fp8_block_to_mxfp8(const QuantizedView& view, Direction direction, TensorView out,
                        Stream stream) {
  const char* op = "fp8_block_to_mxfp8";
  MOIETY_CHECK(is_fp8_block(view.spec.format), "{}: the view is {}, expected FP8 blocks", op,
               name(view.spec.format));
  const ScaleMatrix in = scale_matrix(op, view, direction, true);
  const int64_t cols = direction == Direction::kRow ? view.cols : view.rows;
  check_scales(op, "out", out, {DType::kUE8M0, 2, {in.rows, ceil_div(cols, 32)}});
  check_place(op, view, direction, stream);
  check_device(op, "out", out, stream);
  uint32_t* flags = view.flags.defined() ? view.flags.data<uint32_t>() : nullptr;
  auto* to = static_cast<uint8_t*>(out.raw());
  if (on_gpu(stream)) return fp8_block_to_mxfp8_cuda(in, cols, to, flags, stream);
  stream.run([in, cols, to, flags] { fp8_block_to_mxfp8_cpu(in, cols, to, flags); });
}

}  // namespace moiety::quant
