#include "moiety/gemm/grouped_block.h"
#include "moiety/gemm/grouped_gemm_cuda.h"
#include "moiety/gemm/tile_launch.cuh"

namespace moiety::gemm {
namespace {

// The matrices of the groups begin at `data`, or, with null, have pointers.
void set_matrices(TileGemm& g, void* data, DType dtype, int64_t stride) {
  if (g.ragged == Ragged::kReduction) {
    set_output(g.epilogue, data, dtype, stride);
  } else {
    g.b = {data, stride};
  }
}

}  // namespace

void grouped_gemm_cuda(const GroupedGemmArgs& args, const Stream& stream) {
  const int64_t experts = args.groups.experts;
  if (experts == 0) return;
  TileGemm g{product_of(args)};
  if (const TensorView& packed = args.w.packed(); packed.defined()) {
    g.group_stride = packed.stride(0);
    set_matrices(g, packed.raw(), packed.dtype(), packed.stride(1));
    const TileStart start = tile_start(g, stream);
    return launch(start.name, start.kernel, start.shape, stream, g);
  }
  // Launches for as many experts as have pointers and one row stride.
  g.indexed = true;
  for (int64_t e = 0; e < experts; e += g.groups.groups) {
    const int64_t stride = args.w[e].stride(0);
    g.groups.first = e;
    g.groups.groups = 0;
    for (int64_t i = e; i < experts && i < e + TileGemm::kPointers; ++i) {
      const TensorView w = args.w[i];
      if (w.stride(0) != stride) break;
      g.pointers[g.groups.groups++] = w.raw();
    }
    set_matrices(g, nullptr, args.w.dtype(), stride);
    const TileStart start = tile_start(g, stream);
    launch(start.name, start.kernel, start.shape, stream, g);
  }
}

}  // namespace moiety::gemm
