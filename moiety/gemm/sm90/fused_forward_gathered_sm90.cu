#include "moiety/gemm/sm90/fused.cuh"

namespace moiety::gemm::sm90 {

FusedLaunch fused_forward_gathered_launch(const FusedKernel& kernel) {
  return fused_launch_of<GemmOp::kTN, true>(kernel);
}

}  // namespace moiety::gemm::sm90
