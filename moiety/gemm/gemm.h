// Dense matrix product with an epilogue: the linear layers of the model and their gradients.
//
//   kTN  out[M, N] = a[M, K] . b[N, K]^T     y = x w^T
//   kNN  out[M, N] = a[M, K] . b[K, N]       dx = dy w
//   kNT  out[M, N] = a[K, M]^T . b[K, N]     dw = dy^T x
//
// Epilogue, per element, in fp32: v = alpha * acc; if beta != 0 then v = fma(beta, old, v); one
// rounding to out's dtype. `old` is the element of `c`, by default of `out`; beta = 0 reads
// neither. So a residual is added with one rounding and without overwriting its input.
//
// Quantized operands are bf16 (quant/dequantize.h); what they leave to the accumulators is applied
// first, see OperandScale.
//
// a and b are both fp32 or both bf16; out and c are fp32 or bf16, freely. All fp64 (for gradient
// checks) is done by the reference. Columns are contiguous, row strides are free. Zero sizes are
// legal: with K = 0 acc is +0 and the epilogue runs. `c` is `out` exactly or does not overlap it;
// a and b do not overlap out.
//
// Bits: acc is the chain acc = fma(a, b, acc) over ascending k from +0, in the reference and in the
// vector path alike, so an element depends on its row of a, its column of b and nothing else: not
// on M, N, strides or threads. Where the CPU multiplies bf16 itself (AVX512-BF16, AMX) oneDNN does,
// whose result is within L * 2^-23 * sum|a b| of the reference and depends on the shape as well.
//
// On GPUs fp32 is that chain too. bf16 is within the same bound, L = K: by cuBLASLt (gemm_cuda.h
// says what it takes), whose algorithm depends on the shape, strides, GPU and its version; all
// else, such as scaled operands, by our own tiles, where an element depends on its row and column
// alone. All give the same bits every time. Work areas are the stream's, so a stream's products run
// one after the other; every call can be captured.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::gemm {

enum class GemmOp { kTN, kNN, kNT };

// What a quantized operand leaves to the accumulators; nothing if both are undefined.
struct OperandScale {
  // float32 [1], of a grouped product [E]: acc = round(round(acc * a.tensor) * b.tensor).
  TensorView tensor = {};
  // float32 [rows / block_rows, K / 128], both rounded up, any strides; [E, ...] of grouped
  // weights. Rows are those of `a` or columns of `b` that meet in the output. Over slices of 128
  // elements of the reduction, ascending: acc = fma(part, round(a.block * b.block), acc), each part
  // from +0. Both operands have such scales or none; not with kNT.
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
};

void gemm(const GemmArgs& args, Stream stream);

}  // namespace moiety::gemm
