#include "moiety/gemm/gemm_cuda.h"
#include "moiety/gemm/tile_launch.cuh"

namespace moiety::gemm {

void gemm_cuda(const Product& product, const TensorView& workspace, const Stream& stream) {
  if (product.m == 0 || product.n == 0 || gemm_cublaslt(product, stream, workspace)) return;
  const TileGemm g{product};
  const TileStart start = tile_start(g, stream);
  launch(start.name, start.kernel, start.shape, stream, g);
}

}  // namespace moiety::gemm
