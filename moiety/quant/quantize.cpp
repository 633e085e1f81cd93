#include "moiety/quant/quantize.h"

#include "moiety/base/trace.h"
#include "moiety/quant/quantize/quantize_cuda.h"
#include "moiety/quant/quantize/quantize_job.h"
#include "moiety/quant/quantize/quantize_table.h"

namespace moiety::quant {
namespace {

bool on_gpu(const Stream& stream) { return stream.device().type == DeviceType::kCuda; }

}  // namespace

void compute_amax(TensorView x, const QuantizedView& view, const QuantizeOptions& options,
                  Stream stream) {
  const QuantizeJob job = make_quantize_job("compute_amax", x, view, options, false);
  check_device("compute_amax", "x", x, stream);
  if (on_gpu(stream)) return measure_cuda(job, stream);
  stream.run([job] { measure_cpu({&job, 1}); });
}

void quantize(TensorView x, const QuantizedView& out, const QuantizeOptions& options,
              Stream stream) {
  const QuantizeJob job = make_quantize_job("quantize", x, out, options);
  check_device("quantize", "x", x, stream);
  if (on_gpu(stream)) return quantize_cuda(job, stream);
  stream.run([job] {
    const TraceSpan span(TraceLane::kCompute, "quantize", {{"rows", job.rows}});
    quantize_cpu({&job, 1});
  });
}

void compute_amax_grouped(TensorView x, const RowGroups& groups, const QuantizedView& view,
                          const QuantizeOptions& options, Stream stream) {
  const QuantizeJob job = make_grouped_job("compute_amax_grouped", x, groups, view, options, false);
  check_device("compute_amax_grouped", "x", x, stream);
  if (on_gpu(stream)) return measure_groups_cuda(job, groups, stream);
  stream.run([job, groups] { measure_cpu(group_jobs(job, groups)); });
}

void quantize_grouped(TensorView x, const RowGroups& groups, const QuantizedView& out,
                      const QuantizeOptions& options, Stream stream) {
  const QuantizeJob job = make_grouped_job("quantize_grouped", x, groups, out, options, true);
  check_device("quantize_grouped", "x", x, stream);
  if (on_gpu(stream)) return quantize_groups_cuda(job, groups, stream);
  stream.run([job, groups] {
    const TraceSpan span(TraceLane::kCompute, "quantize_grouped", {{"rows", job.rows}});
    quantize_cpu(group_jobs(job, groups));
  });
}

void quantize_many(const QuantizeTable& table, Stream stream) {
  const QuantizeTable::Impl* impl = &table.impl();
  MOIETY_CHECK(impl->jobs.size() == impl->items.size(), "quantize_many: item {} has no x",
               impl->jobs.size());
  if (impl->jobs.empty()) return;
  impl->check_stream("quantize_many", stream);
  if (impl->device_jobs) return quantize_many_cuda(*impl->device_jobs, stream);
  stream.run([impl] {
    const TraceSpan span(TraceLane::kCompute, "quantize_many",
                         {{"tensors", static_cast<int64_t>(impl->jobs.size())}});
    quantize_cpu(impl->jobs);
  });
}

}  // namespace moiety::quant
