#include "moiety/gemm/sm90/fused.cuh"

namespace moiety::gemm::sm90 {

FusedLaunch fused_backward_launch(int columns) {
  return columns == 192 ? fused_launch_of<GemmOp::kNN, 192, false>()
                        : fused_launch_of<GemmOp::kNN, 128, false>();
}

}  // namespace moiety::gemm::sm90
