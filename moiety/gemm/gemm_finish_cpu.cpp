#include "moiety/base/simd.h"
#include "moiety/gemm/gemm_block.h"

namespace moiety::gemm {

MOIETY_SIMD_CLONES void finish_tile_cpu(const Epilogue& e, const AccTile<float>& t) {
  finish_tile<float>(e, t);
}

}  // namespace moiety::gemm
