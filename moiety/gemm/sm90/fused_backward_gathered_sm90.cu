#include "moiety/gemm/sm90/fused.cuh"

namespace moiety::gemm::sm90 {

FusedLaunch fused_backward_gathered_launch(int columns) {
  return fused_launch_of<GemmOp::kNN, true>(columns);
}

}  // namespace moiety::gemm::sm90
