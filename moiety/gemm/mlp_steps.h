// The steps of the grouped MLP as operations on the caller's buffers, which the paths then run in
// their own order. Internal to moiety/gemm.
#pragma once

#include "moiety/gemm/activation_block.h"
#include "moiety/gemm/grouped_block.h"
#include "moiety/gemm/grouped_mlp.h"

namespace moiety::gemm {

struct MlpForwardSteps {
  GroupedGemmArgs fc1;         // F1
  ActivationBlock activation;  // F2, rows left open
  GroupedGemmArgs fc2;         // F3
};

struct MlpBackwardSteps {
  GroupedGemmArgs fc2_dgrad;   // B1
  ActivationBlock activation;  // B2, rows left open
  GroupedGemmArgs fc1_dgrad;   // B4, if it has an output
  int64_t interleave = 0;      // of the columns that B4 sums over
};

void grouped_mlp_forward_reference(const MlpForwardSteps& steps);
void grouped_mlp_forward_cpu(const MlpForwardSteps& steps);
void grouped_mlp_backward_reference(const MlpBackwardSteps& steps);
void grouped_mlp_backward_cpu(const MlpBackwardSteps& steps);

// B4 alone.
void grouped_mlp_input_reference(const GroupedGemmArgs& fc1_dgrad, int64_t interleave);
void grouped_mlp_input_cpu(const GroupedGemmArgs& fc1_dgrad, int64_t interleave);
// A block of B4 as the sum over the columns of H in plain order, if these are interleaved by a
// multiple of 32, so that dX has the bits that it has without. Otherwise `block`. What is copied
// for it is kept for this thread until its next call.
Product over_plain_columns(const Product& block, int64_t interleave);

// B3, and the part of dprob that comes from b2.
void mlp_bias_gradients(const MlpInput& input, const MlpGradients& g, const TensorView& b2_ED,
                        const Stream& stream);

void sum_rows_reference(const TensorView& rows_RD, const TensorView& row_TK,
                        const TensorView& out_TD);
// The same bits, faster; float32 and bfloat16.
void sum_rows_cpu(const TensorView& rows_RD, const TensorView& row_TK, const TensorView& out_TD);
// The sums on a GPU, float32 and bfloat16, with the same bits; it also records faults of the
// indices.
void sum_rows_cuda(const TensorView& rows_RD, const TensorView& row_TK, const TensorView& out_TD,
                   const TensorView& status, const Stream& stream);

}  // namespace moiety::gemm
