#include "moiety/quant/requantize.h"

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/trace.h"
#include "moiety/quant/cpu_path.h"
#include "moiety/quant/dequantize.h"
#include "moiety/quant/quantize/quantize_cuda.h"
#include "moiety/quant/quantize/quantize_task.h"

namespace moiety::quant {
namespace {

void check(const char* operation, const QuantizedView& rows, const QuantizedView& out) {
  const Format format = rows.spec.format;
  MOIETY_CHECK(!has_one_coding(format),
               "{}: rows are {}, whose col codes are those of its rows (transpose_quantized)",
               operation, name(format));
  MOIETY_CHECK(rows.rows == out.rows && rows.cols == out.cols,
               "{}: rows are [{}, {}], the output is [{}, {}]", operation, rows.rows, rows.cols,
               out.rows, out.cols);
  MOIETY_CHECK(!out.row_data.defined(), "{}: row_data is {}, only the col direction is made",
               operation, out.row_data.describe());
}

bool on_gpu(const char* operation, const QuantizedView& rows, const Stream& stream) {
  const bool gpu = check_devices(operation,
                                 {{"rows.row_data", rows.row_data},
                                  {"rows.row_scales", rows.row_scales},
                                  {"rows.tensor_scale", rows.tensor_scale}},
                                 stream);
  if (gpu && !kCudaBuilt) fail_without_cuda(operation);
  return gpu;
}

// The codes, as if they were the values: jobs say by their place which rows they have.
TensorView in_place_of_values(const QuantizedView& rows) {
  return TensorView(rows.row_data.raw(), DType::kBFloat16, {rows.rows, rows.cols},
                    rows.row_data.device());
}

DequantizeJob values_of(const char* operation, const QuantizedView& rows) {
  return make_dequantize_job(operation, rows, Direction::kRow, in_place_of_values(rows),
                             Dequantized::kValues, false);
}

void run(std::span<const QuantizeJob> jobs, const DequantizeJob& rows, const void* first) {
  if (!detail::by_reference()) return requantize_cpu(jobs, rows, first);
  for (QuantizeJob job : jobs) {
    job.skip = jobs[0].skip;
    requantize_reference(job, rows, first);
  }
}

}  // namespace

void requantize_col(const QuantizedView& rows, const QuantizedView& out,
                    const QuantizeOptions& options, TensorView values_MK, Stream stream) {
  const char* op = "requantize_col";
  check(op, rows, out);
  if (values_MK.defined()) {
    dequantize(rows, Direction::kRow, values_MK, {}, stream);
    return quantize(values_MK, out, options, stream);
  }
  const TensorView first = in_place_of_values(rows);
  const QuantizeJob job = make_quantize_job(op, first, out, options);
  const DequantizeJob values = values_of(op, rows);
  if (on_gpu(op, rows, stream)) {
    if constexpr (kCudaBuilt) return requantize_cuda(job, nullptr, values, stream);
  }
  stream.run([job, values] {
    const TraceSpan span(TraceLane::kCompute, "requantize_col", {{"rows", job.rows}});
    run({&job, 1}, values, job.x);
  });
}

void requantize_col_grouped(const QuantizedView& rows, const RowGroups& groups,
                            const QuantizedView& out, const QuantizeOptions& options,
                            TensorView values_MK, Stream stream) {
  const char* op = "requantize_col_grouped";
  check(op, rows, out);
  if (values_MK.defined()) {
    dequantize(rows, Direction::kRow, values_MK, {}, stream);
    return quantize_grouped(values_MK, groups, out, options, stream);
  }
  const TensorView first = in_place_of_values(rows);
  const QuantizeJob job = make_grouped_job(op, first, groups, out, options);
  const DequantizeJob values = values_of(op, rows);
  if (on_gpu(op, rows, stream)) {
    if constexpr (kCudaBuilt) return requantize_cuda(job, &groups, values, stream);
  }
  stream.run([job, values, groups] {
    const TraceSpan span(TraceLane::kCompute, "requantize_col_grouped", {{"rows", job.rows}});
    run(group_jobs(job, groups), values, job.x);
  });
}

}  // namespace moiety::quant
