#include "moiety/gemm/sm90/fused.cuh"

namespace moiety::gemm::sm90 {

FusedLaunch fused_backward_launch(int columns) {
  return fused_launch_of<GemmOp::kNN, false>(columns);
}

}  // namespace moiety::gemm::sm90
