// A tensor in host memory and its copy on a GPU, both owned, for tests that pass it to the same
// operation on either device. (mirror.h is for tensors that something else owns.)
#pragma once

#include "moiety/base/copy.h"
#include "tests/support/gpu_test.h"
#include "tests/support/tensors.h"

namespace moiety {

class Twin {
 public:
  Twin() = default;
  Twin(DType dtype, std::initializer_list<int64_t> sizes, const Stream& stream)
      : host(dtype, sizes), gpu(dtype, sizes, stream.device()) {}
  // A copy of `x`, contiguous.
  Twin(const TensorView& x, const Stream& stream)
      : host(copy_of(x)), gpu(x.dtype(), x.sizes(), stream.device()) {
    upload(stream);
  }

  void upload(const Stream& stream) const {
    if (host.view().numel() == 0) return;
    copy(gpu, host, stream);
    stream.synchronize();
  }
  Tensor download(const Stream& stream) const { return to_host(gpu, stream); }

  Tensor host, gpu;
};

// The same part of both.
struct Side {
  bool gpu;
  TensorView operator()(const Twin& x) const { return gpu ? x.gpu : x.host; }
};
inline constexpr Side kHost{false}, kOnGpu{true};

}  // namespace moiety
