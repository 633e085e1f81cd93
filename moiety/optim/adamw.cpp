#include "moiety/optim/adamw.h"

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/trace.h"
#include "moiety/optim/adamw_table.h"

namespace moiety::optim {
namespace {

bool is_stored(DType t) { return t == DType::kFloat32 || t == DType::kBFloat16; }

void check_segment(const AdamWArgs& a, const AdamWArgs& first, Device device) {
  const int64_t n = a.grad.numel();
  const auto check = [&](const char* argument, const TensorView& x, DType dtype) {
    check_tensor("adamw", argument, x, dtype, {n});
    MOIETY_CHECK(x.contiguous() && x.device() == device, "adamw: {} {} is not without gaps on {}",
                 argument, x.describe(), name(device));
  };
  const auto check_stored = [&](const char* argument, const TensorView& x) {
    check(argument, x, is_stored(x.dtype()) ? x.dtype() : DType::kFloat32);
  };
  check_stored("grad", a.grad);
  check("master", a.master, DType::kFloat32);
  check_stored("exp_avg", a.exp_avg);
  MOIETY_CHECK(a.exp_avg.dtype() == first.exp_avg.dtype(),
               "adamw: exp_avg is {} of one segment, {} of another", name(first.exp_avg.dtype()),
               name(a.exp_avg.dtype()));
  check("exp_avg_sq", a.exp_avg_sq, a.exp_avg.dtype());
  if (a.weight.defined()) check_stored("weight", a.weight);
  for (const ElementRun& run : a.runs) {
    MOIETY_CHECK(run.begin >= 0 && run.begin <= run.end && run.end <= n,
                 "adamw: run [{}, {}) of {} elements", run.begin, run.end, n);
  }
}

void check_arguments(const AdamW& adam, const TensorView& step) {
  MOIETY_CHECK(adam.eps > 0, "adamw: eps={} must be positive", adam.eps);
  check_tensor("adamw", "step", step, DType::kUInt8, {sizeof(AdamWStep)});
}

}  // namespace

AdamWTable::AdamWTable(std::span<const AdamWArgs> segments, Device device) {
  const auto impl = std::make_shared<Impl>();
  impl->device = device;
  size_t count = 0;
  for (const AdamWArgs& a : segments) {
    check_segment(a, segments[0], device);
    count += a.runs.size();
  }
  impl->runs.reserve(count);  // segments keep spans of the runs
  for (const AdamWArgs& a : segments) {
    if (a.runs.empty()) continue;
    const size_t first = impl->runs.size();
    impl->runs.insert(impl->runs.end(), a.runs.begin(), a.runs.end());
    impl->segments.push_back(a);
    impl->segments.back().runs = std::span(impl->runs).subspan(first);
    for (const ElementRun& run : a.runs) impl->elements += run.end - run.begin;
  }
  if (device.type == DeviceType::kCuda && impl->elements > 0) {
    require_device("adamw", device);
    if constexpr (kCudaBuilt) impl->on_gpu = detail::make_device_table(impl->segments, device);
  }
  impl_ = impl;
}

void adamw(const AdamW& adam, uint64_t seed, TensorView step, const AdamWTable& table,
           Stream stream) {
  check_arguments(adam, step);
  if (!table.impl_ || table.impl_->elements == 0) return;
  MOIETY_CHECK(table.impl_->device == stream.device(),
               "adamw: the table is of {}, the stream of {}", name(table.impl_->device),
               name(stream.device()));
  const detail::AdamWConstants constants(adam, seed);
  if (check_devices("adamw", {{"step", step}}, stream)) {
    if constexpr (kCudaBuilt)
      return detail::adamw_cuda(constants, step, *table.impl_->on_gpu, stream);
    fail_without_cuda("adamw");
  }
  stream.run([=, impl = table.impl_] {
    const TraceSpan span(TraceLane::kCompute, "adamw", {{"elements", impl->elements}});
    const AdamWStep& values = *static_cast<const AdamWStep*>(step.raw());
    if (values.skip) return;
    for (const AdamWArgs& a : impl->segments) detail::adamw_cpu(constants, values, a);
  });
}

void adamw_reference(const AdamW& adam, uint64_t seed, TensorView step, const AdamWTable& table,
                     Stream stream) {
  check_arguments(adam, step);
  if (!table.impl_) return;
  stream.run([=, impl = table.impl_] {
    const AdamWStep& values = *static_cast<const AdamWStep*>(step.raw());
    if (values.skip) return;
    const detail::AdamWConstants constants(adam, seed);
    for (const AdamWArgs& a : impl->segments) detail::adamw_ref(constants, values, a);
  });
}

}  // namespace moiety::optim
