// Cross-entropy of next-token prediction, fused with the output head so that logits exist only for
// one chunk of tokens at a time.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::nn {

// A token whose target is this value, or whose mask is 0, has no target: loss 0, gradient 0.
inline constexpr int32_t kIgnoredTarget = -100;

// Cross-entropy of rows of logits. With lse = max + log sum_v exp(z_v - max) (the sum in the order
// of loss_sum, loss_rows.h):
//   loss = lse - z_y;  dlogits = (1 + 2 z_coef lse) softmax(z) - 1_y
// which is the gradient of loss + z_coef lse^2. Everything is computed in fp32, dlogits rounded
// once. A target outside [0, V) other than kIgnoredTarget is an error; on a GPU it gives a loss and
// a gradient of NaN.
struct CrossEntropyArgs {
  TensorView logits_NV;  // fp32; rows contiguous
  TensorView target_N;   // int32
  TensorView mask_N;     // optional, uint8
  TensorView loss_N;     // fp32
  // Optional, fp32 or bf16. It may lie in the memory of the logits if every row begins where its
  // logits do.
  TensorView dlogits_NV;
  float z_coef = 0;
};
void cross_entropy(const CrossEntropyArgs& args, Stream stream);

// logits = x head^T in fp32 and their cross-entropy; also dx = dlogits head and grad (+)= dlogits^T
// x, each if it is defined. It takes as many tokens at a time as the workspace has rows.
struct LinearCrossEntropyArgs {
  TensorView x_TD;       // storage
  TensorView head_VD;    // storage
  TensorView target_T;   // int32
  TensorView mask_T;     // optional, uint8
  TensorView loss_T;     // fp32
  TensorView dx_TD;      // optional, storage
  TensorView grad_VD;    // optional, fp32
  TensorView workspace;  // fp32 [chunk, V], chunk >= 1
  float z_coef = 0;
  bool accumulate = false;  // add to grad instead of overwriting it
};
void linear_cross_entropy(const LinearCrossEntropyArgs& args, Stream stream);

// The number of tokens in a chunk, at most `tokens`: `requested` or, if that is 0, as many as keep
// its logits within 256 MiB. On a GPU that is at least 4096, since every chunk reads and writes the
// head's gradient.
int64_t loss_chunk(int64_t requested, int64_t tokens, int64_t vocabulary, Device device);

// The scalar reference (also double) and the fast paths, which give the same bits.
void cross_entropy_ref(const CrossEntropyArgs& args);
void cross_entropy_cpu(const CrossEntropyArgs& args);
void cross_entropy_cuda(const CrossEntropyArgs& args, const Stream& stream);

}  // namespace moiety::nn
