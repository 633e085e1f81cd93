#include "moiety/gemm/sm90/fused.cuh"

namespace moiety::gemm::sm90 {

FusedLaunch fused_backward_launch(const FusedKernel& kernel) {
  return fused_launch_of<GemmOp::kNN, false>(kernel);
}

}  // namespace moiety::gemm::sm90
