#include <cmath>

#include "moiety/formats/bf16.h"
#include "moiety/optim/grad_norm_table.h"

namespace moiety::optim::detail {
namespace {

// `counts(run)` tells whether the elements of a run are summed.
template <class Counts>
double sum_of_squares(const std::vector<float>& x, std::span<const ElementRun> runs,
                      Counts&& counts) {
  std::vector<double> squares(x.size());
  for (const ElementRun& run : runs) {
    if (!counts(run)) continue;
    for (int64_t i = run.begin; i < run.end; ++i) {
      squares[i] = static_cast<double>(x[i]) * static_cast<double>(x[i]);
    }
  }
  std::vector<double> sums;
  const int64_t n = static_cast<int64_t>(x.size());
  for (int64_t at = 0; at < n; at += kNormBlock) {
    sums.push_back(
        block_sum(std::min(kNormBlock, n - at), [&](int64_t i) { return squares[at + i]; }));
  }
  return fold_block_sums(std::move(sums));
}

std::vector<float> widen(const TensorView& x) {
  const int64_t n = x.numel();
  if (x.dtype() == DType::kFloat32) return {x.data<float>(), x.data<float>() + n};
  return {x.data<bf16>(), x.data<bf16>() + n};
}

}  // namespace

GradStatistics grad_statistics_ref(TensorView grad, std::span<const ElementRun> runs) {
  const std::vector<float> x = widen(grad);
  GradStatistics out;
  out.sumsq = sum_of_squares(x, runs, [](const ElementRun&) { return true; });
  for (int c = 0; c < kParameterClasses; ++c) {
    out.class_sumsq[c] = sum_of_squares(
        x, runs, [c](const ElementRun& run) { return static_cast<int>(run.kind) == c; });
  }
  for (const ElementRun& run : runs) {
    for (int64_t i = run.begin; i < run.end; ++i) {
      if (std::isfinite(x[i])) continue;
      out.add({.bad = 1, .bad_parameter = run.parameter});
    }
  }
  return out;
}

}  // namespace moiety::optim::detail
