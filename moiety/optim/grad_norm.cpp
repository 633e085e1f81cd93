#include "moiety/optim/grad_norm.h"

#include "moiety/base/trace.h"

namespace moiety::optim {
namespace {

void check_arguments(const TensorView& grad, std::span<const ElementRun> runs) {
  const int64_t n = grad.numel();
  check_tensor("grad_statistics", "grad", grad, DType::kFloat32, {n});
  MOIETY_CHECK(grad.contiguous(), "grad_statistics: grad {} is not contiguous", grad.describe());
  int64_t at = 0;
  for (const ElementRun& run : runs) {
    MOIETY_CHECK(run.begin >= at && run.begin <= run.end && run.end <= n,
                 "grad_statistics: run [{}, {}) behind {} in {} elements", run.begin, run.end, at,
                 n);
    at = run.end;
  }
}

}  // namespace

void GradStatistics::add(const GradStatistics& other) {
  sumsq += other.sumsq;
  for (int c = 0; c < kParameterClasses; ++c) class_sumsq[c] += other.class_sumsq[c];
  bad += other.bad;
  if (other.bad_parameter >= 0 && (bad_parameter < 0 || other.bad_parameter < bad_parameter)) {
    bad_parameter = other.bad_parameter;
  }
}

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

void grad_statistics(TensorView grad, std::span<const ElementRun> runs, GradStatistics* out,
                     Stream stream) {
  check_arguments(grad, runs);
  stream.run([=] {
    const TraceSpan span(TraceLane::kCompute, "grad_statistics", {{"elements", grad.numel()}});
    *out = detail::grad_statistics_cpu(grad, runs);
  });
}

void grad_statistics_reference(TensorView grad, std::span<const ElementRun> runs,
                               GradStatistics* out, Stream stream) {
  check_arguments(grad, runs);
  stream.run([=] { *out = detail::grad_statistics_ref(grad, runs); });
}

}  // namespace moiety::optim
