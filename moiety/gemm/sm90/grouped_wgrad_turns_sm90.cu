#include "moiety/gemm/sm90/wgrad_turns.cuh"

namespace moiety::gemm::sm90 {

std::span<const KernelLaunch> wgrad_turns_launches() {
  static const KernelLaunch table[] = {{{GemmOp::kNT, WgradTurns::kColumns, Gathered::kNone, true},
                                        grouped_wgrad_turns,
                                        WgradTurns::kThreads,
                                        WgradTurns::kBytes}};
  return table;
}

}  // namespace moiety::gemm::sm90
