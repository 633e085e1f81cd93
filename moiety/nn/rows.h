// Walks the rows of a view: the last dimension is a row, the leading ones are counted row-major.
#pragma once

#include <array>

#include "moiety/base/tensor_view.h"

namespace moiety::nn {

inline int64_t row_count(const TensorView& x) {
  int64_t n = 1;
  for (int d = 0; d + 1 < x.dims(); ++d) n *= x.size(d);
  return n;
}

template <class T>
class RowCursor {
 public:
  // A cursor at row `row` of `x`. An absent view gives null rows.
  RowCursor(const TensorView& x, int64_t row) : x_(&x), data_(x.data<T>()) {
    for (int d = x.dims() - 2; d >= 0 && row > 0; --d) {
      index_[d] = row % x.size(d);
      row /= x.size(d);
      offset_ += index_[d] * x.stride(d);
    }
  }

  T* row() const { return data_ ? data_ + offset_ : nullptr; }

  void next() {
    for (int d = x_->dims() - 2; d >= 0; --d) {
      offset_ += x_->stride(d);
      if (++index_[d] < x_->size(d)) return;
      offset_ -= x_->size(d) * x_->stride(d);
      index_[d] = 0;
    }
  }

 private:
  const TensorView* x_;
  T* data_;
  int64_t offset_ = 0;
  std::array<int64_t, kMaxDims> index_{};
};

}  // namespace moiety::nn
