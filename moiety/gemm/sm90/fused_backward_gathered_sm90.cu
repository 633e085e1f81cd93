#include "moiety/gemm/sm90/fused.cuh"

namespace moiety::gemm::sm90 {

FusedLaunch fused_backward_gathered_launch(int columns) {
  return columns == 192 ? fused_launch_of<GemmOp::kNN, 192, true>()
                        : fused_launch_of<GemmOp::kNN, 128, true>();
}

}  // namespace moiety::gemm::sm90
