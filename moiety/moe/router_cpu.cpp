// The arithmetic of router_block.h, compiled for the instruction sets of x86.
#include "moiety/base/simd.h"
#include "moiety/moe/router_block.h"

namespace moiety::moe::detail {

MOIETY_SIMD_CLONES void forward_block_cpu(const ForwardRows<float>& rows, int64_t begin,
                                          int64_t end, int32_t* count, float* sum) {
  forward_block(rows, begin, end, count, sum);
}

MOIETY_SIMD_CLONES void backward_block_cpu(const BackwardRows<float>& rows, int64_t begin,
                                           int64_t end, const float* dq, float z_slope) {
  backward_block(rows, begin, end, dq, z_slope);
}

}  // namespace moiety::moe::detail
