#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>
#include <utility>

#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/base/simd.h"
#include "moiety/formats/bf16.h"
#include "moiety/optim/grad_norm_table.h"

namespace moiety::optim::detail {
namespace {

constexpr int64_t kGrain = 16;  // blocks of a task

struct BlockSum {
  double sumsq = 0;
  int64_t bad = 0;
};

// Sums a whole block. Lanes are summed 16 at a time, so that their sums stay in registers.
MOIETY_SIMD_CLONES
BlockSum sum_block(const float* x) {
  constexpr int64_t kStrip = 16;
  std::array<double, kNormLanes> lanes;
  int32_t bad = 0;
  for (int64_t l = 0; l < kNormLanes; l += kStrip) {
    std::array<double, kStrip> sum{};
    for (int64_t i = l; i < kNormBlock; i += kNormLanes) {
      for (int64_t k = 0; k < kStrip; ++k) {
        const double v = x[i + k];
        sum[k] += v * v;
        bad += (std::bit_cast<uint32_t>(x[i + k]) & 0x7F800000u) == 0x7F800000u;
      }
    }
    for (int64_t k = 0; k < kStrip; ++k) lanes[l + k] = sum[k];
  }
  for (int64_t o = kNormLanes / 2; o >= 1; o /= 2) {
    for (int64_t l = 0; l < o; ++l) lanes[l] += lanes[l + o];
  }
  return {lanes[0], bad};
}

// The sums of all blocks: by class and, last, over all classes.
struct Sums {
  explicit Sums(int64_t blocks) {
    for (auto& x : by_class) x.resize(blocks);
  }
  std::array<std::vector<double>, kParameterClasses + 1> by_class;
};

// Copies the elements of block `at` that are in runs (of class `kind`, if that is not negative) and
// puts zeros in place of the others.
template <class G>
void copy_masked(const G* grad, int64_t at, std::span<const ElementRun> runs, int kind,
                 float* tile) {
  std::fill(tile, tile + kNormBlock, 0.0f);
  for (const ElementRun& run : runs) {
    if (kind >= 0 && static_cast<int>(run.kind) != kind) continue;
    const int64_t begin = std::max(run.begin, at);
    const int64_t end = std::min(run.end, at + kNormBlock);
    if (begin < end) std::copy(grad + begin, grad + end, tile + (begin - at));
  }
}

template <class G>
int first_bad_parameter(const G* grad, int64_t at, std::span<const ElementRun> runs) {
  int first = -1;
  for (const ElementRun& run : runs) {
    if (first >= 0 && run.parameter >= first) continue;
    const int64_t begin = std::max(run.begin, at);
    const int64_t end = std::min(run.end, at + kNormBlock);
    for (int64_t i = begin; i < end; ++i) {
      if (std::isfinite(static_cast<float>(grad[i]))) continue;
      first = run.parameter;
      break;
    }
  }
  return first;
}

// Adds block `b`, whose elements lie only in `runs`.
template <class G>
GradStatistics add_block(const G* grad, int64_t b, std::span<const ElementRun> runs, Sums& sums) {
  const int64_t at = b * kNormBlock;
  const bool whole = runs.size() == 1 && runs[0].begin <= at && at + kNormBlock <= runs[0].end;
  std::array<float, kNormBlock> tile;
  const float* elements = tile.data();
  if constexpr (std::is_same_v<G, float>) {
    if (whole) elements = grad + at;
  }
  if (elements == tile.data()) copy_masked(grad, at, runs, -1, tile.data());
  const BlockSum all = sum_block(elements);
  for (int c = 0; c < kParameterClasses; ++c) {
    if (runs.size() <= 1) {
      if (!runs.empty() && static_cast<int>(runs[0].kind) == c) sums.by_class[c][b] = all.sumsq;
      continue;
    }
    copy_masked(grad, at, runs, c, tile.data());
    sums.by_class[c][b] = sum_block(tile.data()).sumsq;
  }
  sums.by_class[kParameterClasses][b] = all.sumsq;
  GradStatistics out;
  out.bad = all.bad;
  if (all.bad > 0) out.bad_parameter = first_bad_parameter(grad, at, runs);
  return out;
}

// The runs that touch [begin, end); runs are ascending.
std::span<const ElementRun> runs_within(std::span<const ElementRun> runs, int64_t begin,
                                        int64_t end) {
  const auto first = std::partition_point(runs.begin(), runs.end(),
                                          [&](const ElementRun& r) { return r.end <= begin; });
  const auto last =
      std::partition_point(first, runs.end(), [&](const ElementRun& r) { return r.begin < end; });
  return {first, last};
}

template <class G>
GradStatistics sum_segment(const G* data, int64_t n, std::span<const ElementRun> runs) {
  const int64_t blocks = ceil_div(n, kNormBlock);
  Sums sums(blocks);
  std::vector<GradStatistics> tasks(ceil_div(blocks, kGrain));
  parallel_for(blocks, kGrain, [&](int64_t begin, int64_t end) {
    GradStatistics task;
    for (int64_t b = begin; b < end; ++b) {
      const int64_t at = b * kNormBlock;
      task.add(add_block(data, b, runs_within(runs, at, at + kNormBlock), sums));
    }
    tasks[begin / kGrain] = task;
  });
  GradStatistics out;
  for (const GradStatistics& task : tasks) out.add(task);  // adds the counts; the sums follow
  for (int c = 0; c < kParameterClasses; ++c) {
    out.class_sumsq[c] = fold_block_sums(std::move(sums.by_class[c]));
  }
  out.sumsq = fold_block_sums(std::move(sums.by_class[kParameterClasses]));
  return out;
}

}  // namespace

GradStatistics grad_statistics_cpu(TensorView grad, std::span<const ElementRun> runs) {
  return grad.dtype() == DType::kFloat32 ? sum_segment(grad.data<float>(), grad.numel(), runs)
                                         : sum_segment(grad.data<bf16>(), grad.numel(), runs);
}

}  // namespace moiety::optim::detail
