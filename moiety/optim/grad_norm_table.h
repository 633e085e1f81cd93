// The contents of a GradStatisticsTable, and the implementations over checked arguments. Internal
// to moiety/optim.
#pragma once

#include <array>
#include <vector>

#include "moiety/optim/grad_norm.h"

namespace moiety::optim {
namespace detail {

inline constexpr int64_t kNormBlock = 4096;
inline constexpr int64_t kNormLanes = 256;

// The sum of n <= 4096 terms in the order of a block; term(i) is element i.
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

struct GradDeviceTable;  // grad_norm_cuda.cu
std::shared_ptr<const GradDeviceTable> make_device_table(std::span<const GradSegment> segments,
                                                         Device device);
void begin_grad_statistics_cuda(const GradDeviceTable& table, size_t first, size_t end,
                                const Stream& stream);
void end_grad_statistics_cuda(const GradDeviceTable& table, TensorView out, const Stream& stream);

}  // namespace detail

struct GradStatisticsTable::Impl {
  Device device;
  std::vector<ElementRun> runs;  // runs of all segments, into which their spans point
  std::vector<GradSegment> segments;
  int64_t elements = 0;
  std::shared_ptr<const detail::GradDeviceTable> on_gpu;
};

}  // namespace moiety::optim
