#include "moiety/optim/grad_norm.h"

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/trace.h"
#include "moiety/optim/grad_norm_table.h"

namespace moiety::optim {
namespace {

void check_segment(const GradSegment& segment, Device device) {
  const TensorView& grad = segment.grad;
  const int64_t n = grad.numel();
  check_tensor("grad_statistics", "grad", grad,
               grad.dtype() == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32, {n});
  MOIETY_CHECK(grad.contiguous() && grad.device() == device,
               "grad_statistics: grad {} is not without gaps on {}", grad.describe(), name(device));
  int64_t at = 0;
  for (const ElementRun& run : segment.runs) {
    MOIETY_CHECK(run.begin >= at && run.begin <= run.end && run.end <= n,
                 "grad_statistics: run [{}, {}) behind {} in {} elements", run.begin, run.end, at,
                 n);
    at = run.end;
  }
}

GradStatistics& check_out(const TensorView& out) {
  check_tensor("grad_statistics", "out", out, DType::kUInt8, {sizeof(GradStatistics)});
  return *static_cast<GradStatistics*>(out.raw());
}

}  // namespace

double detail::fold_block_sums(std::vector<double> sums) {
  if (sums.empty()) return 0;
  while (sums.size() > 1) {
    std::vector<double> next;
    const int64_t n = static_cast<int64_t>(sums.size());
    for (int64_t at = 0; at < n; at += kNormBlock) {
      next.push_back(
          block_sum(std::min(kNormBlock, n - at), [&](int64_t i) { return sums[at + i]; }));
    }
    sums = std::move(next);
  }
  return sums[0];
}

GradStatisticsTable::GradStatisticsTable(std::span<const GradSegment> segments, Device device) {
  const auto impl = std::make_shared<Impl>();
  impl->device = device;
  size_t count = 0;
  for (const GradSegment& s : segments) {
    check_segment(s, device);
    count += s.runs.size();
  }
  impl->runs.reserve(count);  // segments keep spans of the runs
  for (const GradSegment& s : segments) {
    const size_t first = impl->runs.size();
    impl->runs.insert(impl->runs.end(), s.runs.begin(), s.runs.end());
    impl->segments.push_back({s.grad, std::span(impl->runs).subspan(first)});
    impl->elements += s.grad.numel();
  }
  if (device.type == DeviceType::kCuda) {
    require_device("grad_statistics", device);
    if constexpr (kCudaBuilt) impl->on_gpu = detail::make_device_table(impl->segments, device);
  }
  impl_ = impl;
}

void grad_statistics(const GradStatisticsTable& table, TensorView out, Stream stream) {
  GradStatistics& sum = check_out(out);
  MOIETY_CHECK(table.impl_, "grad_statistics: no table");
  MOIETY_CHECK(table.impl_->device == stream.device(),
               "grad_statistics: the table is of {}, the stream of {}", name(table.impl_->device),
               name(stream.device()));
  if (check_devices("grad_statistics", {{"out", out}}, stream)) {
    begin_grad_statistics(table, 0, table.impl_->segments.size(), stream);
    return end_grad_statistics(table, out, stream);
  }
  stream.run([&sum, impl = table.impl_] {
    const TraceSpan span(TraceLane::kCompute, "grad_statistics", {{"elements", impl->elements}});
    sum = {};
    for (const GradSegment& s : impl->segments) {
      sum.add(detail::grad_statistics_cpu(s.grad, s.runs));
    }
  });
}

void begin_grad_statistics(const GradStatisticsTable& table, size_t first, size_t end,
                           const Stream& stream) {
  MOIETY_CHECK(table.impl_ && first <= end && end <= table.impl_->segments.size(),
               "grad_statistics: segments [{}, {}) of {}", first, end,
               table.impl_ ? table.impl_->segments.size() : 0);
  MOIETY_CHECK(stream.device().type == DeviceType::kCuda && table.impl_->device == stream.device(),
               "grad_statistics: in parts on {}, the table is of {}", name(stream.device()),
               name(table.impl_->device));
  if constexpr (kCudaBuilt) {
    return detail::begin_grad_statistics_cuda(*table.impl_->on_gpu, first, end, stream);
  }
  fail_without_cuda("grad_statistics");
}

void end_grad_statistics(const GradStatisticsTable& table, TensorView out, const Stream& stream) {
  check_out(out);
  if constexpr (kCudaBuilt) {
    return detail::end_grad_statistics_cuda(*table.impl_->on_gpu, out, stream);
  }
  fail_without_cuda("grad_statistics");
}

void grad_statistics_reference(const GradStatisticsTable& table, TensorView out, Stream stream) {
  GradStatistics& sum = check_out(out);
  MOIETY_CHECK(table.impl_, "grad_statistics: no table");
  stream.run([&sum, impl = table.impl_] {
    sum = {};
    for (const GradSegment& s : impl->segments) {
      sum.add(detail::grad_statistics_ref(s.grad, s.runs));
    }
  });
}

}  // namespace moiety::optim
