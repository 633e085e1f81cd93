// The experts with quantized linears: the operation of grouped_mlp.h with the same steps, rounding
// points and buffers. H, A, dA and dH are bf16; operands are made from these rounded values. Rows may
// be read through source_R, with the bits of rows that lie in the order of experts, and those of a
// token are summed where there is a row_TK.
#pragma once

#include "moiety/gemm/grouped_mlp.h"
#include "moiety/gemm/quantized_linear.h"

namespace moiety::gemm {

struct QuantizedMlp {
  Activation activation;
  int64_t interleave = 0;
  QuantizedLinear fc1;    // [E, 2F, D]; squared ReLU [E, F, D]
  QuantizedLinear fc2;    // [E, D, F]
  TensorView b1_EH = {};  // [E, 2F], optional
  TensorView b2_ED = {};  // [E, D], optional
};

void quantized_mlp_forward(const QuantizedMlp& mlp, const MlpInput& input, TensorView h,
                           TensorView o, Arena& arena, Stream stream);
// Runs only F1, with the same bits.
void quantized_mlp_hidden(const QuantizedMlp& mlp, const MlpInput& input, TensorView h,
                          Arena& arena, Stream stream);
void quantized_mlp_backward_data(const QuantizedMlp& mlp, const MlpInput& input,
                                 const MlpGradients& gradients, Arena& arena, Stream stream);
// Runs G2, then G1.
void quantized_mlp_backward_weights(const QuantizedMlp& mlp, const MlpInput& input,
                                    const MlpGradients& gradients, const GradTarget& w2,
                                    const GradTarget& w1, Arena& arena, Stream stream);

}  // namespace moiety::gemm
