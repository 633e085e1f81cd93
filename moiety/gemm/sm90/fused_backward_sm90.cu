#include "moiety/gemm/sm90/fused.cuh"

namespace moiety::gemm::sm90 {

FusedLaunch fused_backward_launch(bool gathers) {
  return gathers ? fused_launch_of<GemmOp::kNN, true>() : fused_launch_of<GemmOp::kNN, false>();
}

}  // namespace moiety::gemm::sm90
