#include "moiety/quant/scale_layout.h"

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/integer.h"
#include "moiety/base/trace.h"
#include "moiety/quant/cpu_path.h"
#include "moiety/quant/scale_layout_job.h"

namespace moiety::quant {
namespace {

// The compact scales of a direction. `need_data` false: the shape alone is asked for.
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

// Whether the stream is of a GPU, where then the scales and `other` are too.
bool on_gpu(const char* operation, const QuantizedView& view, Direction direction,
            const char* argument, const TensorView& other, const Stream& stream) {
  const bool row = direction == Direction::kRow || is_tile(view.spec.format);
  return check_devices(
      operation,
      {{row ? "row_scales" : "col_scales", row ? view.row_scales : view.col_scales},
       {"flags", view.flags},
       {argument, other}},
      stream);
}

ArraySpec array_of(const ScaleMatrix& m, ScaleLayout layout) {
  switch (layout) {
    case ScaleLayout::kSm100Swizzled:
      return {DType::kUInt8, 1, {layout_scales(layout, m.rows, m.cols), 0}};
    case ScaleLayout::kPadded:
      return {DType::kUInt8, 2, {round_up(m.rows, 128), round_up(m.cols, 4)}};
    default:
      return {DType::kFloat32, 2, {m.cols, round_up(m.rows, 4)}};
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
  return layout == ScaleLayout::kSm90MnMajor ? cols * round_up(rows, 4)
                                             : round_up(rows, 128) * round_up(cols, 4);
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
  auto* to = static_cast<uint8_t*>(out.raw());
  if (on_gpu("convert_scales", view, direction, "out", out, stream)) {
    if constexpr (kCudaBuilt) return convert_scales_cuda(in, layout, to, stream);
    fail_without_cuda("convert_scales");
  }
  stream.run([in, layout, to] {
    const TraceSpan span(TraceLane::kCompute, "convert_scales", {{"rows", in.rows}});
    detail::by_reference() ? convert_scales_reference(in, layout, to)
                           : convert_scales_cpu(in, layout, to);
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
  const auto* from = static_cast<const uint8_t*>(scales.raw());
  if (on_gpu("compact_scales", view, direction, "scales", scales, stream)) {
    if constexpr (kCudaBuilt) return compact_scales_cuda(from, layout, out, stream);
    fail_without_cuda("compact_scales");
  }
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
  uint32_t* flags = view.flags.defined() ? view.flags.data<uint32_t>() : nullptr;
  auto* to = static_cast<uint8_t*>(out.raw());
  if (on_gpu(op, view, direction, "out", out, stream)) {
    if constexpr (kCudaBuilt) return fp8_block_to_mxfp8_cuda(in, cols, to, flags, stream);
    fail_without_cuda(op);
  }
  stream.run([in, cols, to, flags] { fp8_block_to_mxfp8_cpu(in, cols, to, flags); });
}

}  // namespace moiety::quant
