// Cross-entropy fused with the output head where the ranks of pass.tp hold slices of the
// vocabulary. Every rank gets the losses of all tokens, and the gradient of own tokens. Logits of a
// slice exist for one chunk of tokens at a time; a row's maximum, its sum of exponentials and its
// target's logit are gathered from the ranks. A row's loss is computed as in loss.h, except that
// the sum of exponentials is taken by slices, each with its own maximum, and these sums are added in
// rank order.
#pragma once

#include "moiety/model/pass.h"
#include "moiety/nn/embedding.h"

namespace moiety::model {

struct ParallelCrossEntropyArgs {
  TensorView x_TD;     // storage, own tokens
  TensorView head_VD;  // storage: this rank's rows that exist, perhaps none
  nn::VocabularySlice slice;
  TensorView target_T;  // int32, all tokens
  TensorView mask_T;    // optional, uint8, all tokens
  TensorView loss_T;    // fp32, all tokens, in the order of chunks
  TensorView dx_TD;     // optional, storage, own tokens
  TensorView grad_VD;   // optional, fp32
  int64_t chunk = 1;    // own tokens of a chunk; the same number on all ranks
  float z_coef = 0;
  bool accumulate = false;  // add to grad instead of overwriting it

  bool gradients() const { return dx_TD.defined() || grad_VD.defined(); }
};
void parallel_cross_entropy(const Pass& pass, const ParallelCrossEntropyArgs& args);

}  // namespace moiety::model
