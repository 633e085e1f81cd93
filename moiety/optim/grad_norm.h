// The sum of squares of segments' gradients, in fp64 with a fixed order
// (docs/spec/optimizer.md#statistics), and the elements in them that are not finite.
//
// The order: a block is 4096 consecutive elements of a segment. In a block there are 256 lanes,
// lane l takes elements l, l + 256, ... ascending, and lanes are folded by halves (l += l + 128,
// then 64, ..., 1). Block sums are grouped by 4096 and summed in the same way until one value is
// left; segments are added in ascending order. Elements in no run count as +0, and so do elements
// of other classes in the sum of a class.
//
// A GPU gives the same bits, except for the payload of a NaN.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/optim/buffer_layout.h"
#include "moiety/optim/step_decision.h"

namespace moiety::optim {

// The statistics as plain data without pointers and gaps, so that they may lie in memory of a GPU.
struct GradStatistics {
  double sumsq = 0;
  std::array<double, kParameterClasses> class_sumsq{};
  int64_t bad = 0;             // number of non-finite elements
  int64_t bad_parameter = -1;  // smallest index of a parameter that has one

  MOIETY_HD void add(const GradStatistics& other) {
    sumsq += other.sumsq;
    for (int c = 0; c < kParameterClasses; ++c) class_sumsq[c] += other.class_sumsq[c];
    bad += other.bad;
    // As an unsigned number, -1 (none) is the largest.
    const auto none_last = [](int64_t p) { return static_cast<uint64_t>(p); };
    if (none_last(other.bad_parameter) < none_last(bad_parameter)) {
      bad_parameter = other.bad_parameter;
    }
  }
};

struct GradSegment {
  TensorView grad;                   // float32 or bfloat16 [n]
  std::span<const ElementRun> runs;  // ascending
};

// The segments of all buckets, made once. Their gradients lie on `device` and outlive the table;
// runs are copied. On a GPU it also owns the workspace, so it serves one stream at a time. Copies
// are cheap and share the table's contents. Making a table allocates, and waits for a GPU.
class GradStatisticsTable {
 public:
  GradStatisticsTable() = default;  // an empty table, without a device
  GradStatisticsTable(std::span<const GradSegment> segments, Device device);

  struct Impl;

 private:
  friend void grad_statistics(const GradStatisticsTable&, TensorView, Stream);
  friend void begin_grad_statistics(const GradStatisticsTable&, size_t, size_t, const Stream&);
  friend void end_grad_statistics(const GradStatisticsTable&, TensorView, const Stream&);
  friend void grad_statistics_reference(const GradStatisticsTable&, TensorView, Stream);
  std::shared_ptr<const Impl> impl_;
};

// out := a GradStatistics, as uint8 [sizeof(GradStatistics)], aligned to 8. The stream is of the
// table's device. The reference runs on the CPU.
void grad_statistics(const GradStatisticsTable& table, TensorView out, Stream stream);
// The same on a GPU in parts, for gradients that come one after the other: the first looks at the
// segments [first, end), the second makes `out` of what all were found to be.
void begin_grad_statistics(const GradStatisticsTable& table, size_t first, size_t end,
                           const Stream& stream);
void end_grad_statistics(const GradStatisticsTable& table, TensorView out, const Stream& stream);
void grad_statistics_reference(const GradStatisticsTable& table, TensorView out, Stream stream);

}  // namespace moiety::optim
