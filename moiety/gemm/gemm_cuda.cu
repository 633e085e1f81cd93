#include "moiety/gemm/gemm_cuda.h"
#include "moiety/gemm/sm90/launch.cuh"
#include "moiety/gemm/tile_launch.cuh"

namespace moiety::gemm {
namespace {

// Computes the product as that of one group by Hopper's kernels for groups, if these take it.
bool gemm_sm90(const Product& product, const Stream& stream) {
  const bool by_reduction = product.op == GemmOp::kNT;
  TileGemm g{product};
  g.ragged = by_reduction ? Ragged::kReduction : Ragged::kRows;
  g.groups.capacity = by_reduction ? product.k : product.m;
  const GpuProperties& gpu = gpu_properties(stream.device().index);
  if (sm90::refusal(g, gpu)) return false;
  const sm90::Start start =
      sm90::start(g, sm90::choose_kernel(g, multiprocessors_of(g, gpu)), stream);
  launch("gemm sm90", start.kernel, start.shape, stream, start.maps, g);
  return true;
}

}  // namespace

void gemm_cuda(const Product& product, const TensorView& workspace, const Stream& stream) {
  if (product.m == 0 || product.n == 0 || gemm_cublaslt(product, stream, workspace)) return;
  if (gemm_sm90(product, stream)) return;
  const TileGemm g{product};
  const TileStart start = tile_start(g, stream);
  launch(start.name, start.kernel, start.shape, stream, g);
}

}  // namespace moiety::gemm
