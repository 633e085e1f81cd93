// Dequantization: quantized tensors back to matrices (docs/spec/formats.md#dequantization).
#pragma once

#include <cstdint>

#include "moiety/base/stream.h"
#include "moiety/formats/quantized.h"

namespace moiety::quant {

struct DequantizeOptions {
  bool undo_rht = false;  // rht_col views, col direction: invert the transform
};

// The matrix that a direction gives: of row X, of col X transposed. Columns of MXFP8 are stored as
// they stand in X, and come so.
struct DequantizedShape {
  int64_t rows = 0, cols = 0;
  bool transposed = false;  // element (r, c) is that of X at (c, r)
};
// [M, K], or transposed [K, M], with 16 * ceil(M / 16) columns for an rht_col view unless the
// transform is undone.
DequantizedShape dequantized_shape(const QuantizedView& x, Direction direction,
                                   const DequantizeOptions& options = {});

// out := the values of a direction, in the shape that dequantized_shape says.
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
