#include "moiety/quant/transpose.h"

#include "moiety/base/cuda_built.h"
#include "moiety/base/trace.h"
#include "moiety/quant/cpu_path.h"
#include "moiety/quant/quantize/quantize_table.h"

namespace moiety::quant {

TransposeJob make_transpose_job(const QuantizedView& view) {
  const char* op = "transpose_quantized";
  check_quantized(op, view);
  const Format format = view.spec.format;
  if (format == Format::kFp8Block1x128 || format == Format::kNvfp4) {
    fail(ErrorKind::kUnsupported,
         "{}: the directions of {} are different roundings of their source; only tiles and tensor "
         "scales have codes in common",
         op, name(format));
  }
  MOIETY_CHECK(view.row_data.defined() && view.col_data.defined(),
               "{}: row_data is {}, col_data is {}, expected both", op, view.row_data.describe(),
               view.col_data.describe());
  TransposeJob job;
  job.in = static_cast<const uint8_t*>(view.row_data.raw());
  job.out = static_cast<uint8_t*>(view.col_data.raw());
  job.rows = view.rows;
  job.cols = view.cols;
  job.in_pitch = view.row_data.size(1);
  job.out_pitch = view.col_data.size(1);
  job.fp4 = is_fp4(format);
  if (view.amax.defined()) job.amax = view.amax.data<float>();
  if (view.tensor_scale.defined()) job.tensor_scale = view.tensor_scale.data<float>();
  return job;
}

void transpose_quantized(const QuantizeTable& table, Stream stream) {
  const QuantizeTable::Impl* impl = &table.impl();
  if (impl->no_transposes) throw *impl->no_transposes;
  if (impl->transposes.empty()) return;
  impl->check_stream("transpose_quantized", stream);
  if (impl->device_transposes) {
    if constexpr (kCudaBuilt) return transpose_cuda(*impl->device_transposes, stream);
    fail_without_cuda("transpose_quantized");
  }
  stream.run([impl] {
    const TraceSpan span(TraceLane::kCompute, "transpose_quantized",
                         {{"tensors", static_cast<int64_t>(impl->transposes.size())}});
    if (!detail::by_reference()) return transpose_cpu(impl->transposes);
    for (const TransposeJob& job : impl->transposes) transpose_reference(job);
  });
}

}  // namespace moiety::quant
