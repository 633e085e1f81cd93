// Sum of squares of a segment's gradient, in fp64 with a fixed order (spec optimizer_checkpoint,
// section 4), and what in it is not finite.
//
// Order: blocks of 4096 consecutive elements of the segment; in a block 256 lanes, lane l takes
// elements l, l + 256, ... ascending; lanes are folded by halves (l += l + 128, then 64, ..., 1).
// Block sums are grouped by 4096 and summed in the same way until one value is left. Elements in no
// run, and for the sum of a class those of other classes, count as +0.
#pragma once

#include <span>

#include "moiety/base/stream.h"
#include "moiety/optim/buffer_layout.h"
#include "moiety/optim/step_rule.h"

namespace moiety::optim {

struct GradStatistics {
  double sumsq = 0;
  std::array<double, kParameterClasses> class_sumsq{};
  int64_t bad = 0;         // non-finite elements
  int bad_parameter = -1;  // smallest index of a parameter that has one

  // Segments are added in the order of their buckets.
  void add(const GradStatistics& other);
};

// out := statistics of grad (float32 [n]) over the elements of `runs`.
void grad_statistics(TensorView grad, std::span<const ElementRun> runs, GradStatistics* out,
                     Stream stream);
void grad_statistics_reference(TensorView grad, std::span<const ElementRun> runs,
                               GradStatistics* out, Stream stream);

namespace detail {

inline constexpr int64_t kNormBlock = 4096;
inline constexpr int64_t kNormLanes = 256;

// Sum of n <= 4096 terms in the order of a block; term(i) is element i.
template <class Term>
double block_sum(int64_t n, Term&& term) {
  std::array<double, kNormLanes> lanes{};
  for (int64_t i = 0; i < n; ++i) lanes[i % kNormLanes] += term(i);
  for (int64_t o = kNormLanes / 2; o >= 1; o /= 2) {
    for (int64_t l = 0; l < o; ++l) lanes[l] += lanes[l + o];
  }
  return lanes[0];
}

// Groups sums until one is left; 0 if there are none.
double fold_block_sums(std::vector<double> sums);

GradStatistics grad_statistics_ref(TensorView grad, std::span<const ElementRun> runs);
GradStatistics grad_statistics_cpu(TensorView grad, std::span<const ElementRun> runs);

}  // namespace detail
}  // namespace moiety::optim
