#include "moiety/gemm/sm90/fused.cuh"

namespace moiety::gemm::sm90 {

FusedLaunch fused_backward_gathered_launch(const FusedKernel& kernel) {
  return fused_launch_of<GemmOp::kNN, true>(kernel);
}

}  // namespace moiety::gemm::sm90
