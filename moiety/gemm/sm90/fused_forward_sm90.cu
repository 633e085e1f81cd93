#include "moiety/gemm/sm90/fused.cuh"

namespace moiety::gemm::sm90 {

FusedLaunch fused_forward_launch(int columns) {
  return columns == 192 ? fused_launch_of<GemmOp::kTN, 192, false>()
                        : fused_launch_of<GemmOp::kTN, 128, false>();
}

}  // namespace moiety::gemm::sm90
