#include "moiety/gemm/gemm_cuda.h"

#include "moiety/gemm/tile_gemm.h"

namespace moiety::gemm {

void gemm_cuda(const GemmArgs& args, const BlockGemm& block, const Stream& stream) {
  if (block.m == 0 || block.n == 0) return;
  const TensorView &a_scale = args.a_scale.tensor, &b_scale = args.b_scale.tensor;
  const bool scaled = a_scale.defined() || b_scale.defined();
  if (!scaled && gemm_cublaslt(block, stream)) return;
  TileGemm g;
  g.op = block.op;
  g.dtype = block.dtype;
  g.m = block.m;
  g.n = block.n;
  g.k = block.k;
  g.a = block.a;
  g.b = block.b;
  g.a_scales = block.a_scales;
  g.b_scales = block.b_scales;
  if (a_scale.defined()) g.a_scale.data = a_scale.data<float>();
  if (b_scale.defined()) g.b_scale.data = b_scale.data<float>();
  g.alpha.value = block.epilogue.alpha;
  g.beta.value = block.epilogue.beta;
  g.epilogue = block.epilogue;
  tile_gemm_cuda(g, stream);
}

void tile_gemm_cuda(const TileGemm& g, const Stream& stream) {
  switch (g.dtype) {
    case DType::kBFloat16:
      return tile_gemm_bf16_cuda(g, stream);
    case DType::kFloat32:
      return tile_gemm_fp32_cuda(g, stream);
    default:
      fail(ErrorKind::kUnsupported, "gemm: {} operands are multiplied on CPUs alone",
           name(g.dtype));
  }
}

}  // namespace moiety::gemm
