#include "moiety/gemm/sm90/grouped_sm90.cuh"

namespace moiety::gemm::sm90 {

std::span<const KernelLaunch> pairs_launches() {
  static const KernelLaunch table[] = {launch_of_pairs<GemmOp::kTN, 256, Gathered::kA>(),
                                       launch_of_pairs<GemmOp::kNN, 256, Gathered::kA>()};
  return table;
}

}  // namespace moiety::gemm::sm90
