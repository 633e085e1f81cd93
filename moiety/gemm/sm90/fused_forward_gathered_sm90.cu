#include "moiety/gemm/sm90/fused.cuh"

namespace moiety::gemm::sm90 {

FusedLaunch fused_forward_gathered_launch(int columns) {
  return columns == 192 ? fused_launch_of<GemmOp::kTN, 192, true>()
                        : fused_launch_of<GemmOp::kTN, 128, true>();
}

}  // namespace moiety::gemm::sm90
