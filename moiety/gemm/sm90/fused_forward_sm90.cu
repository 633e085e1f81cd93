#include "moiety/gemm/sm90/fused.cuh"

namespace moiety::gemm::sm90 {

FusedLaunch fused_forward_launch(bool gathers) {
  return gathers ? fused_launch_of<GemmOp::kTN, true>() : fused_launch_of<GemmOp::kTN, false>();
}

}  // namespace moiety::gemm::sm90
