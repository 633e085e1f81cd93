#include "moiety/quant/quantize.h"

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/trace.h"
#include "moiety/quant/cpu_path.h"
#include "moiety/quant/quantize/quantize_cuda.h"
#include "moiety/quant/quantize/quantize_job.h"
#include "moiety/quant/quantize/quantize_table.h"

namespace moiety::quant {
namespace {

// The jobs on a CPU, by the path of the moment; `skip` is that of the first.
void run_measure(std::span<const QuantizeJob> jobs) {
  if (!detail::by_reference()) return measure_cpu(jobs);
  for (const QuantizeJob& job : jobs) measure_reference(job);
}
void run_quantize(std::span<const QuantizeJob> jobs) {
  if (!detail::by_reference()) return quantize_cpu(jobs);
  for (QuantizeJob job : jobs) {
    job.skip = jobs[0].skip;
    quantize_reference(job);
  }
}

}  // namespace

void compute_amax(TensorView x, const QuantizedView& view, const QuantizeOptions& options,
                  Stream stream) {
  const QuantizeJob job = make_quantize_job("compute_amax", x, view, options, false);
  if (check_devices("compute_amax", {{"x", x}}, stream)) {
    if constexpr (kCudaBuilt) return quantize_cuda(job, nullptr, QuantizePass::kMeasure, stream);
    fail_without_cuda("compute_amax");
  }
  stream.run([job] { run_measure({&job, 1}); });
}

void quantize(TensorView x, const QuantizedView& out, const QuantizeOptions& options,
              Stream stream) {
  const QuantizeJob job = make_quantize_job("quantize", x, out, options);
  if (check_devices("quantize", {{"x", x}}, stream)) {
    if constexpr (kCudaBuilt) return quantize_cuda(job, nullptr, QuantizePass::kCast, stream);
    fail_without_cuda("quantize");
  }
  stream.run([job] {
    const TraceSpan span(TraceLane::kCompute, "quantize", {{"rows", job.rows}});
    run_quantize({&job, 1});
  });
}

void compute_amax_grouped(TensorView x, const RowGroups& groups, const QuantizedView& view,
                          const QuantizeOptions& options, Stream stream) {
  const QuantizeJob job = make_grouped_job("compute_amax_grouped", x, groups, view, options, false);
  if (check_devices("compute_amax_grouped", {{"x", x}}, stream)) {
    if constexpr (kCudaBuilt) return quantize_cuda(job, &groups, QuantizePass::kMeasure, stream);
    fail_without_cuda("compute_amax_grouped");
  }
  stream.run([job, groups] { run_measure(group_jobs(job, groups)); });
}

void quantize_grouped(TensorView x, const RowGroups& groups, const QuantizedView& out,
                      const QuantizeOptions& options, Stream stream) {
  const QuantizeJob job = make_grouped_job("quantize_grouped", x, groups, out, options, true);
  if (check_devices("quantize_grouped", {{"x", x}}, stream)) {
    if constexpr (kCudaBuilt) return quantize_cuda(job, &groups, QuantizePass::kCast, stream);
    fail_without_cuda("quantize_grouped");
  }
  stream.run([job, groups] {
    const TraceSpan span(TraceLane::kCompute, "quantize_grouped", {{"rows", job.rows}});
    run_quantize(group_jobs(job, groups));
  });
}

void quantize_many(const QuantizeTable& table, Stream stream) {
  const QuantizeTable::Impl* impl = &table.impl();
  MOIETY_CHECK(impl->jobs.size() == impl->items.size(), "quantize_many: item {} has no x",
               impl->jobs.size());
  if (impl->jobs.empty()) return;
  impl->check_stream("quantize_many", stream);
  if (impl->device_jobs) {
    if constexpr (kCudaBuilt) return quantize_many_cuda(*impl->device_jobs, stream);
    fail_without_cuda("quantize_many");
  }
  stream.run([impl] {
    const TraceSpan span(TraceLane::kCompute, "quantize_many",
                         {{"tensors", static_cast<int64_t>(impl->jobs.size())}});
    run_quantize(impl->jobs);
  });
}

}  // namespace moiety::quant
