#include "moiety/gemm/sm90/exchanged.cuh"

namespace moiety::gemm::sm90 {

std::span<const KernelLaunch> exchanged_launches() {
  static const KernelLaunch table[] = {launch_of_exchanged<GemmOp::kTN, Gathered::kNone>(),
                                       launch_of_exchanged<GemmOp::kNN, Gathered::kNone>(),
                                       launch_of_exchanged<GemmOp::kTN, Gathered::kA>()};
  return table;
}

}  // namespace moiety::gemm::sm90
