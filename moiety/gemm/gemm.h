// The dense matrix product with an epilogue: the linear layers of the model and their gradients.
//
//    kTN  out[M, N] = a[M, K] . b[N, K]^T     y = x w^T
//    kNN  out[M, N] = a[M, K] . b[K, N]       dx = dy w
//    kNT  out[M, N] = a[K, M]^T . b[K, N]     dw = dy^T x
//
// The epilogue runs per element, in fp32: v = alpha * acc; if beta != 0 then v = fma(beta, old, v);
// one rounding to out's dtype. `old` is the element of `c`, by default of `out`; beta = 0 reads
// neither. So a residual is added with one rounding and without overwriting its input.
//
// Quantized operands are bf16 (quant/dequantize.h); the scales that they leave to the accumulators
// are applied first, see OperandScale.
//
// a and b are both fp32 or both bf16; out and c are fp32 or bf16, independently. With fp64 all are
// (for gradient checks), and the reference computes. Columns are contiguous, row strides are free.
// Zero sizes are legal: with K = 0 acc is +0 and the epilogue runs. `c` is exactly `out` or does
// not overlap it; a and b do not overlap out.
//
// The bits: acc is the chain acc = fma(a, b, acc) over ascending k from +0, both in the reference
// and in the vector path. So an element depends only on its row of a and its column of b: not on M,
// N, strides or threads. Where the CPU has AVX512-BF16, bf16 products have that chain's bits too,
// except that every subnormal operand and sum counts as zero. Where it has AMX, its instruction sums
// even and odd steps of each 32 apart: within L * 2^-23 * sum|a b| of the reference, L the reduction's
// length, subnormals again aside; an element still depends only on its row and its column.
//
// On GPUs fp32 is that chain too. bf16 is within the same bound, with L = K. cuBLASLt computes the
// products that it takes (gemm_cuda.h); its algorithm depends on the shape, strides, GPU and its
// version. Moiety's tiles compute all others, such as those with scaled operands; there an element
// depends only on its row and column. All give the same bits every time, and every call can be
// captured. Without `workspace` the area that cuBLASLt works in belongs to the stream, so that graphs
// which were captured on one stream may not run side by side; with it a call has no memory of its
// own.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::gemm {

enum class GemmOp { kTN, kNN, kNT };

// The scales that a quantized operand leaves to the accumulators; none if both are undefined.
struct OperandScale {
  // float32 [1], for a grouped product [E]: acc = round(round(acc * a.tensor) * b.tensor).
  TensorView tensor = {};
  // float32 [rows / block_rows, K / 128], both rounded up, any strides; [E, ...] for grouped
  // weights. Rows are the rows of `a` or columns of `b` that meet in the output. Over slices of 128
  // elements of the reduction, ascending: acc = fma(part, round(a.block * b.block), acc), where
  // each part begins at +0. Both operands have such scales or none; not with kNT.
  TensorView block = {};
  int64_t block_rows = 1;
};

struct GemmArgs {
  GemmOp op = GemmOp::kTN;
  TensorView a;
  TensorView b;
  TensorView out;
  float alpha = 1;
  float beta = 0;
  TensorView c = {};  // optional
  OperandScale a_scale = {};
  OperandScale b_scale = {};
  // uint8 [at least gemm_workspace bytes], aligned to 256, optional. No result depends on it.
  TensorView workspace = {};
};

// Bytes of `workspace` for these arguments on this stream's device; 0 on a CPU.
int64_t gemm_workspace(const GemmArgs& args, Stream stream);

void gemm(const GemmArgs& args, Stream stream);

}  // namespace moiety::gemm
