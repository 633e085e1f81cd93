#include "moiety/gemm/sm90/fused.cuh"

namespace moiety::gemm::sm90 {

FusedLaunch fused_forward_launch(const FusedKernel& kernel) {
  return fused_launch_of<GemmOp::kTN, false>(kernel);
}

}  // namespace moiety::gemm::sm90
