// The checked arguments of accumulate. Internal to moiety/gtp; the contract is in accumulate.h.
#pragma once

#include <vector>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::gtp {

struct AccumulateJob {
  std::vector<TensorView> chunks;
  TensorView main;
  int64_t valid_rows = 0;
  bool first = false;
};

// The first element of a row.
template <class T>
T* row_of(const TensorView& x, int64_t member, int64_t row) {
  return static_cast<T*>(x.raw()) + member * x.stride(0) + row * x.stride(1);
}

void accumulate_reference(const AccumulateJob& job);
void accumulate_cpu(const AccumulateJob& job);
// On a GPU at most kMostGpuChunks chunks.
inline constexpr int kMostGpuChunks = 64;
void accumulate_cuda(const AccumulateJob& job, const Stream& stream);

}  // namespace moiety::gtp
