// A linear layer whose operands are quantized (docs/spec/grouped.md#quantized-linears), dense or
// for experts:
//
//    forward          y = round(x w^T + residual)
//    input gradient   dx = round(dy w + addend)
//    weight gradient  dw (+)= dy^T x
//
// x, y, dy and dx are bf16 (y and dx also fp32), dw is fp32 or bf16 main_grad. Operands are exactly
// those of block-scaled hardware (quantized_operand.h), products are bf16 with fp32 accumulators
// (gemm.h), so results differ from that hardware's only in the order of sums. The workspace, which
// holds the operands, is on the arena and given back.
#pragma once

#include "moiety/gemm/quantized_operand.h"

namespace moiety::gemm {

struct QuantizedLinear {
  const Recipe* recipe = nullptr;
  LinearWeight weight;
  RandomBits gradient_bits = {};
  // Delayed scaling of x and of dy, if the recipe's formats have it (OperandCast).
  const quant::DelayedScaling* input_scaling = nullptr;
  const quant::DelayedScaling* gradient_scaling = nullptr;
  // For a grouped forward, optional: x as recipe->input has quantized it, as many rows as x has. x
  // is then not read.
  QuantizedView rows = {};
  // For a grouped weight gradient, optional: x's column codes, of make_columns. x is then not read,
  // but for its width.
  QuantizedView columns = {};
  int sm_limit = 0;  // GPU: the most multiprocessors that a grouped product takes; 0: all
};

void quantized_forward(const QuantizedLinear& linear, TensorView x, TensorView y,
                       TensorView residual, Arena& arena, Stream stream);
void quantized_input_gradient(const QuantizedLinear& linear, TensorView dy, TensorView dx,
                              TensorView addend, Arena& arena, Stream stream);
// Adds to grad if `accumulate`, otherwise overwrites it.
void quantized_weight_gradient(const QuantizedLinear& linear, TensorView dy, TensorView x,
                               TensorView grad, bool accumulate, Arena& arena, Stream stream);

// Bytes of the arena that the products take while they run. `experts` is 0 for a dense layer.
// `rows` are those of x and dy, for groups the capacity.
struct LinearSize {
  int64_t experts = 0, n = 0, k = 0, rows = 0;
  bool in_format = true;  // the weight's owner keeps it in the recipe's format
  // Rows that maps read x and dy from; 0 without a map.
  int64_t x_sources = 0, dy_sources = 0;
  bool x_columns = false;  // the weight gradient has QuantizedLinear::columns
};
struct LinearBytes {
  int64_t forward = 0, input_gradient = 0, weight_gradient = 0;
};
LinearBytes quantized_linear_bytes(const Recipe& recipe, const LinearSize& size);

// Fills `columns` (allocate_columns, in recipe->input) with x's column codes: what is kept of x where
// only the weight gradient reads it again. linear.rows are as in forward.
void make_columns(const QuantizedLinear& linear, const Groups& groups, const GroupedTensor& x,
                  const QuantizedView& columns, Arena& arena, Stream stream);

// The same for rows of groups, [capacity, ...], or x and dy read through source_R; bias and beta are
// as in grouped_gemm.h. There is no residual.
void quantized_grouped_forward(const QuantizedLinear& linear, const Groups& groups,
                               const GroupedTensor& x, TensorView y, TensorView bias_EN,
                               TensorView bias_scale_R, Arena& arena, Stream stream);
void quantized_grouped_input_gradient(const QuantizedLinear& linear, const Groups& groups,
                                      const GroupedTensor& dy, TensorView dx, Arena& arena,
                                      Stream stream);
void quantized_grouped_weight_gradient(const QuantizedLinear& linear, const Groups& groups,
                                       const GroupedTensor& dy, const GroupedTensor& x,
                                       const GroupedWeight& grad, const GroupScalar& beta,
                                       Arena& arena, Stream stream);

}  // namespace moiety::gemm
