#include "moiety/quant/dequantize.h"

#include <utility>

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/integer.h"
#include "moiety/base/trace.h"
#include "moiety/quant/convert/dequantize_job.h"
#include "moiety/quant/cpu_path.h"

namespace moiety::quant {
namespace {

// Sets the arrays of the direction in `job`; row strides of scales count scales.
void set_arrays(const char* operation, const QuantizedView& x, Direction direction,
                DequantizeJob* job) {
  const Format format = x.spec.format;
  const bool row = direction == Direction::kRow, tile = is_tile(format);
  const TensorView& data = row || format == Format::kMxfp8Tile32 ? x.row_data : x.col_data;
  const TensorView& scales = row || tile ? x.row_scales : x.col_scales;
  MOIETY_CHECK(data.defined(), "{}: x has no {} data", operation, row ? "row" : "col");
  MOIETY_CHECK(scales.defined() || format == Format::kFp8Tensor, "{}: x has no {} scales",
               operation, row || tile ? "row" : "col");
  const bool transposed = dequantized_shape(x, direction).transposed;
  job->codes = static_cast<const uint8_t*>(data.raw());
  job->pitch = data.size(1);
  job->rows = transposed ? x.cols : x.rows;
  job->cols = transposed ? x.rows : x.cols;
  if (!scales.defined()) return;
  const BlockShape block = block_shape(format);
  job->scales = scales.raw();
  job->block_rows = block.rows;
  job->block_cols = block.cols;
  job->row_stride = scales.size(1);
  job->col_stride = 1;
  if (format == Format::kMxfp8 && !row) {
    job->block_rows = 32;
    job->block_cols = 1;
  } else if (tile && transposed) {
    job->row_stride = 1;
    job->col_stride = scales.size(1);
  }
}

}  // namespace

DequantizedShape dequantized_shape(const QuantizedView& x, Direction direction,
                                   const DequantizeOptions& options) {
  if (direction == Direction::kRow || is_mxfp8(x.spec.format)) return {x.rows, x.cols, false};
  const bool has_tail = x.spec.rht_col && !options.undo_rht;
  return {x.cols, has_tail ? round_up(x.rows, 16) : x.rows, true};
}

DequantizeJob make_dequantize_job(const char* operation, const QuantizedView& x,
                                  Direction direction, const TensorView& out, Dequantized what,
                                  bool undo_rht) {
  check_quantized(operation, x);
  const QuantSpec& spec = x.spec;
  MOIETY_CHECK(x.layout == ScaleLayout::kCompact, "{}: scales are {}, expected compact", operation,
               name(x.layout));
  const bool rotated = spec.rht_col && direction == Direction::kCol;
  MOIETY_CHECK(!undo_rht || rotated, "{}: undo_rht of a direction that is not transformed",
               operation);
  DequantizeJob job;
  job.spec = spec;
  job.what = what;
  job.undo_rht = undo_rht;
  set_arrays(operation, x, direction, &job);
  const bool operand = what == Dequantized::kOperand;
  // The operand leaves these scales to the accumulators.
  if (operand && is_fp8_block(spec.format) && !spec.pow2_scales) job.scales = nullptr;
  if (!operand && is_tensor_scaled(spec.format)) {
    MOIETY_CHECK(x.tensor_scale.defined(), "{}: x has no tensor_scale", operation);
    job.tensor_scale = x.tensor_scale.data<float>();
    if (direction == Direction::kCol) ++job.tensor_scale;
    if (spec.row_scaled) job.tensor_stride = 1;
  }
  job.out_cols = dequantized_shape(x, direction, {undo_rht}).cols;
  job.dtype = out.dtype() == DType::kFloat32 && !operand ? DType::kFloat32 : DType::kBFloat16;
  check_tensor(operation, "out", out, job.dtype, {job.rows, job.out_cols});
  MOIETY_CHECK(out.stride(1) == 1 || job.out_cols <= 1,
               "{}: out is {}, expected columns without gaps", operation, out.describe());
  MOIETY_CHECK(job.rows <= 1 || out.stride(0) >= job.out_cols,
               "{}: out is {}, expected rows that do not overlap", operation, out.describe());
  job.out = out.raw();
  job.out_stride = out.stride(0);
  return job;
}

namespace {

bool on_gpu(const char* operation, const QuantizedView& x, const TensorView& out,
            const Stream& stream) {
  return check_devices(operation,
                       {{"out", out},
                        {"row_data", x.row_data},
                        {"row_scales", x.row_scales},
                        {"col_data", x.col_data},
                        {"col_scales", x.col_scales},
                        {"tensor_scale", x.tensor_scale}},
                       stream);
}

void enqueue(const char* operation, const DequantizeJob& job, const Stream& stream) {
  stream.run([job, operation] {
    const TraceSpan span(TraceLane::kCompute, operation, {{"rows", job.rows}});
    detail::by_reference() ? dequantize_reference(job) : dequantize_cpu(job);
  });
}

}  // namespace

void dequantize(const QuantizedView& x, Direction direction, TensorView out,
                const DequantizeOptions& options, Stream stream) {
  const char* op = "dequantize";
  const DequantizeJob job =
      make_dequantize_job(op, x, direction, out, Dequantized::kValues, options.undo_rht);
  if (on_gpu(op, x, out, stream)) {
    if constexpr (kCudaBuilt) return dequantize_cuda(job, stream);
    fail_without_cuda(op);
  }
  enqueue(op, job, stream);
}

void dequantize_operand(const QuantizedView& x, Direction direction, TensorView out_bf16,
                        Stream stream) {
  const char* op = "dequantize_operand";
  const DequantizeJob job =
      make_dequantize_job(op, x, direction, out_bf16, Dequantized::kOperand, false);
  if (on_gpu(op, x, out_bf16, stream)) {
    if constexpr (kCudaBuilt) return dequantize_cuda(job, stream);
    fail_without_cuda(op);
  }
  enqueue(op, job, stream);
}

}  // namespace moiety::quant
