// RMSNorm of the heads of q and k, followed by rope: one pass over both, forward and backward.
//
// The bits are those of norm.h on the query heads and on the key heads, each with its own weight,
// and of rope.h on what they stored: the normalized heads are rounded to the storage dtype before
// they are rotated, and so is the gradient that is rotated back before it meets the norm.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::nn {

// The angles of T tokens, as in RopeArgs.
struct HeadAngles {
  TensorView table;
  TensorView position_T;  // optional int32; if absent, position t is t mod seq_len
  int64_t seq_len = 0;
};

struct NormRopeArgs {
  TensorView x_TGNC;      // storage; N - 1 query heads and the key head of each group; C even
  TensorView q_weight_C;  // storage
  TensorView k_weight_C;
  TensorView y_TGNC;  // may be x
  HeadAngles angles;
  float eps = 1e-6f;
};
void norm_rope(const NormRopeArgs& args, Stream stream);

struct NormRopeBackwardArgs {
  TensorView x_TGNC;
  TensorView q_weight_C;
  TensorView k_weight_C;
  TensorView d_TGNC;    // the gradient of y on entry, that of x on return
  TensorView q_grad_C;  // fp32
  TensorView k_grad_C;
  TensorView workspace;  // fp32 [norm_rope_blocks(T, G, N, C), C]
  HeadAngles angles;
  float eps = 1e-6f;
  // add to the gradient of the weight instead of overwriting it
  bool q_accumulate = false;
  bool k_accumulate = false;
};
void norm_rope_backward(const NormRopeBackwardArgs& args, Stream stream);

// Rows of the workspace: the blocks of query heads, then those of key heads.
int64_t norm_rope_blocks(int64_t tokens, int64_t groups, int64_t heads_a_group, int64_t head_dim);

// The operations of which these consist, one after the other. They define the bits, and compute
// what no kernel takes in one pass.
void norm_then_rope(const NormRopeArgs& args, const Stream& stream);
void rope_then_norm_backward(const NormRopeBackwardArgs& args, const Stream& stream);

// The passes on GPUs, of heads that choose_norm_rope (norm_kernel.h) has a kernel for.
bool one_pass(const NormRopeArgs& args);
bool one_pass(const NormRopeBackwardArgs& args);
void norm_rope_cuda(const NormRopeArgs& args, const Stream& stream);
void norm_rope_backward_cuda(const NormRopeBackwardArgs& args, const Stream& stream);

}  // namespace moiety::nn
