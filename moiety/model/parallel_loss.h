// Cross-entropy fused with the output head where the ranks of pass.tp hold slices of the
// vocabulary: the same losses on every rank, of all tokens, and the gradient of own tokens. Logits
// of a slice exist for one chunk of tokens at a time; a row's maximum, its sum of exponentials and
// its target's logit are combined over the ranks. What a row computes is that of loss.h, with the
// sum of exponentials by slices, in rank order.
#pragma once

#include "moiety/model/pass.h"
#include "moiety/nn/embedding.h"

namespace moiety::model {

struct ParallelCrossEntropyArgs {
  TensorView x_TD;     // storage, own tokens
  TensorView head_VD;  // storage: this rank's rows that exist, maybe none
  nn::VocabularySlice slice;
  TensorView target_T;  // int32, all tokens
  TensorView mask_T;    // optional, uint8, all tokens
  TensorView loss_T;    // fp32, all tokens, in the order of chunks
  TensorView dx_TD;     // optional, storage, own tokens
  TensorView grad_VD;   // fp32, exactly if there is dx
  int64_t chunk = 1;    // own tokens of a chunk; all ranks have as many in it
  float z_coef = 0;
  bool accumulate = false;  // add to grad, else overwrite it
};
void parallel_cross_entropy(const Pass& pass, const ParallelCrossEntropyArgs& args);

}  // namespace moiety::model
