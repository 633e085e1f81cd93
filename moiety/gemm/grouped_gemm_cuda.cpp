#include "moiety/gemm/grouped_gemm_cuda.h"

#include "moiety/gemm/grouped_block.h"
#include "moiety/gemm/tile_gemm.h"

namespace moiety::gemm {
namespace {

TileFactor tile_factor(const GroupScalar& x) {
  TileFactor f;
  f.value = x.value;
  if (x.per_group.defined()) {
    f.data = x.per_group.data<float>();
    f.stride = x.per_group.numel() == 1 ? 0 : 1;
  }
  return f;
}

TileFactor tile_factor(const OperandScale& x) {
  TileFactor f;
  if (x.tensor.defined()) {
    f.data = x.tensor.data<float>();
    f.stride = 1;
  }
  return f;
}

void set_block_scales(const GroupedGemmArgs& args, TileGemm& g) {
  const TensorView& b = args.b_scale.block;
  if (!b.defined()) return;
  g.a_scales = block_scales(args.a_scale, args.a_scale.block);
  const bool each = args.op != GroupedOp::kWgrad;  // [E, rows, slices]
  g.b_scales = {b.data<float>(), b.stride(each ? 1 : 0), b.stride(each ? 2 : 1),
                args.b_scale.block_rows};
  if (each) g.b_scales_group = b.stride(0);
}

// Everything except the matrices of the experts.
TileGemm tile_gemm(const GroupedGemmArgs& args) {
  TileGemm g;
  g.dtype = args.a.data.dtype();
  g.groups.begin = args.groups.begin_E1.data<int64_t>();
  if (args.groups.count_E.defined()) g.groups.count = args.groups.count_E.data<int64_t>();
  g.groups.capacity = args.groups.capacity;
  g.a = block_operand(args.a);
  if (args.op == GroupedOp::kWgrad) {
    const int width = args.transposed ? 0 : 1;
    g.ragged = Ragged::kReduction;
    g.op = args.transposed ? GemmOp::kTN : GemmOp::kNT;
    g.m = args.a.data.size(width);
    g.n = args.b.data.size(width);
    g.b = block_operand(args.b);
    g.epilogue.out_dtype = args.w.dtype();
  } else {
    g.ragged = Ragged::kRows;
    g.op = args.op == GroupedOp::kForward ? GemmOp::kTN : GemmOp::kNN;
    g.n = args.out.size(1);
    g.k = args.a.data.size(1);
    g.epilogue.out = args.out.raw();
    g.epilogue.out_dtype = args.out.dtype();
    g.epilogue.out_stride = args.out.stride(0);
    if (args.bias_EN.defined()) {
      g.epilogue.bias = args.bias_EN.raw();
      g.epilogue.bias_dtype = args.bias_EN.dtype();
      g.epilogue.bias_scale = args.bias_scale_R.raw();
    }
  }
  set_block_scales(args, g);
  g.a_scale = tile_factor(args.a_scale);
  g.b_scale = tile_factor(args.b_scale);
  g.alpha = tile_factor(args.alpha);
  g.beta = tile_factor(args.beta);
  return g;
}

void launch_with(TileGemm& g, void* data, int64_t stride, const Stream& stream) {
  if (g.ragged == Ragged::kReduction) {
    g.epilogue.out = data;
    g.epilogue.out_stride = stride;
  } else {
    g.b = {data, stride};
  }
  g.epilogue.old = g.epilogue.out;
  g.epilogue.old_dtype = g.epilogue.out_dtype;
  g.epilogue.old_stride = g.epilogue.out_stride;
  tile_gemm_cuda(g, stream);
}

}  // namespace

void grouped_gemm_cuda(const GroupedGemmArgs& args, const Stream& stream) {
  if (args.groups.experts == 0) return;
  record_faults_cuda(args.groups, OperationId::kGroupedGemm, args.a, args.b, stream);
  grouped_products_cuda(args, stream);
}

void grouped_products_cuda(const GroupedGemmArgs& args, const Stream& stream) {
  const int64_t experts = args.groups.experts;
  if (experts == 0) return;
  TileGemm g = tile_gemm(args);
  if (const TensorView& packed = args.w.packed(); packed.defined()) {
    g.groups.groups = experts;
    g.group_stride = packed.stride(0);
    return launch_with(g, packed.raw(), packed.stride(1), stream);
  }
  // Launches products for as many experts as have pointers and one row stride.
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
    launch_with(g, nullptr, stride, stream);
  }
}

}  // namespace moiety::gemm
