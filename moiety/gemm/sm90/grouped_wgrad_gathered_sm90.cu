#include "moiety/gemm/sm90/grouped_sm90.cuh"

namespace moiety::gemm::sm90 {

std::span<const KernelLaunch> wgrad_gathered_launches() {
  static const KernelLaunch table[] = {
      launch_of<GemmOp::kNT, 128, Gathered::kA>(), launch_of<GemmOp::kNT, 192, Gathered::kA>(),
      launch_of<GemmOp::kNT, 256, Gathered::kA>(), launch_of<GemmOp::kNT, 128, Gathered::kB>(),
      launch_of_transposed<256>()};
  return table;
}

}  // namespace moiety::gemm::sm90
