#include "moiety/gemm/sm90/grouped_sm90.cuh"

namespace moiety::gemm::sm90 {

std::span<const KernelLaunch> forward_launches() {
  static const KernelLaunch table[] = {launch_of<GemmOp::kTN, 128, Gathered::kNone>(),
                                       launch_of<GemmOp::kTN, 192, Gathered::kNone>(),
                                       launch_of<GemmOp::kTN, 256, Gathered::kNone>()};
  return table;
}

}  // namespace moiety::gemm::sm90
