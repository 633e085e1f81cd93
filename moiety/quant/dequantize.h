// Dequantization: quantized tensors back to matrices (docs/spec/formats.md#dequantization).
#pragma once

#include "moiety/base/stream.h"
#include "moiety/formats/quantized.h"

namespace moiety::quant {

struct DequantizeOptions {
  bool undo_rht = false;  // rht_col views, col direction: invert the transform
};

// out := the values of a direction. The row direction gives out [M, K]. The col direction gives X
// transposed, [K, M] (MXFP8: [M, K]), and [K][16 * ceil(M / 16)] for an rht_col view unless the
// transform is undone.
//
// NVFP4 is RN(RN(q * s) * g), other formats RN(q * scale), in float32; a bf16 out is the encoding
// of that. Overflow is inf. Columns of out are contiguous, its row stride is free. Scales must be
// compact.
void dequantize(const QuantizedView& x, Direction direction, TensorView out,
                const DequantizeOptions& options, Stream stream);

// out := the bf16 matrix for GEMMs without block-scaled matrix instructions, exact
// (docs/numerics.md, Low-precision formats); shapes as above. Factors that it leaves out go to the
// accumulators:
//   kNvfp4*              q * s; tensor_scale of both operands, one after the other, in the epilogue
//   kMxfp8*              q * 2^e: nothing is left
//   FP8 block, pow2      q * scale: nothing is left
//   FP8 block, other     q; the block scales, per 128 of the reduction
//   kFp8Tensor           q; tensor_scale, in the epilogue
void dequantize_operand(const QuantizedView& x, Direction direction, TensorView out_bf16,
                        Stream stream);

}  // namespace moiety::quant
