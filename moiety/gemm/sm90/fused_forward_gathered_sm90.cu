#include "moiety/gemm/sm90/fused.cuh"

namespace moiety::gemm::sm90 {

FusedLaunch fused_forward_gathered_launch(int columns) {
  return fused_launch_of<GemmOp::kTN, true>(columns);
}

}  // namespace moiety::gemm::sm90
