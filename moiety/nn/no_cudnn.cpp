// Attention by cuDNN in builds without CUDA or cuDNN's headers: Moiety's kernels take it instead.
#include "moiety/base/gpu.h"
#include "moiety/nn/attention_cuda.h"

namespace moiety::nn {

bool cudnn_takes(const AttentionJob&, int) { return false; }

void attention_cudnn(const AttentionJob&, const TensorView&, const Stream&) {
  fail_without_cuda("attention");
}

int64_t attention_cudnn_workspace(const AttentionJob&, int) { return 0; }

int64_t cudnn_workspace(const AttentionSizes&) { return 0; }

const CudnnStatus& cudnn_status() {
  static const CudnnStatus status{false, 0, "cuDNN's headers were not there when this was built"};
  return status;
}

}  // namespace moiety::nn
