#include "moiety/gemm/sm90/fused.cuh"

namespace moiety::gemm::sm90 {

FusedLaunch fused_forward_launch(int columns) {
  return fused_launch_of<GemmOp::kTN, false>(columns);
}

}  // namespace moiety::gemm::sm90
