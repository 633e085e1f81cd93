// The offsets at which rows begin in views of equal sizes, for kernels. The last dimension is a
// row, the leading ones are counted row-major, as in rows.h. Dimensions that follow each other in
// memory in all views are joined, so that most views need no division.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <limits>

#include "moiety/base/tensor_view.h"

namespace moiety::nn {

// Division by a number that the host knows (Granlund and Montgomery, 1994).
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(int64_t d) : divisor_(d) {
    if (d >> 31 != 0) return;
    shift_ = std::bit_width(static_cast<uint64_t>(d - 1));
    const uint64_t scaled = ((uint64_t{1} << shift_) - static_cast<uint64_t>(d)) << 32;
    magic_ = static_cast<uint32_t>(scaled / static_cast<uint64_t>(d) + 1);
  }
  __device__ int64_t divide(int64_t n) const {
    return (n | divisor_) >> 31 != 0 ? n / divisor_ : divide(static_cast<int32_t>(n));
  }
  // The dividend and the divisor are less than 2^31.
  __device__ int32_t divide(int32_t n) const {
    return static_cast<int32_t>((__umulhi(n, magic_) + static_cast<uint32_t>(n)) >> shift_);
  }
  __device__ int64_t divisor() const { return divisor_; }

 private:
  int64_t divisor_ = 1;
  uint32_t magic_ = 1;
  int shift_ = 0;
};

template <int kViews>
struct RowMap {
  int dims = 0;                           // all but the first have a divisor
  std::array<Divisor, kMaxDims> size;     // innermost first
  int64_t stride[kMaxDims][kViews] = {};  // in elements
  bool small = true;                      // rows and offsets are less than 2^31

  // Absent views are left out.
  explicit RowMap(const std::array<const TensorView*, kViews>& views) {
    const TensorView& x = *views[0];
    for (int d = x.dims() - 2; d >= 0; --d) {
      if (x.size(d) == 1) continue;
      bool joins = dims > 0;
      for (int i = 0; i < kViews; ++i) {
        if (!views[i]->defined()) continue;
        stride[dims][i] = views[i]->stride(d);
        joins = joins && stride[dims][i] == stride[dims - 1][i] * length_;
      }
      if (joins) {
        length_ *= x.size(d);
      } else {
        length_ = x.size(d);
        ++dims;
      }
      size[dims - 1] = Divisor(length_ > 0 ? length_ : 1);
    }
    for (const TensorView* view : views) {
      int64_t end = 0;
      for (int d = 0; d < view->dims(); ++d) end += view->size(d) * std::abs(view->stride(d));
      small = small && end <= std::numeric_limits<int32_t>::max();
    }
  }

  __device__ std::array<int64_t, kViews> offsets(int64_t row) const {
    return small ? walk(static_cast<int32_t>(row)) : walk(row);
  }

 private:
  template <class Int>
  __device__ std::array<int64_t, kViews> walk(Int row) const {
    Int sum[kViews] = {};
    for (int d = 0; d < dims; ++d) {
      const Int rest = d + 1 == dims ? 0 : size[d].divide(row);
      const Int index = row - rest * static_cast<Int>(size[d].divisor());
#pragma unroll
      for (int i = 0; i < kViews; ++i) sum[i] += index * static_cast<Int>(stride[d][i]);
      row = rest;
    }
    std::array<int64_t, kViews> out;
#pragma unroll
    for (int i = 0; i < kViews; ++i) out[i] = sum[i];
    return out;
  }

  int64_t length_ = 1;  // length of the dimensions joined last
};

}  // namespace moiety::nn
