// Token embedding: rows of a table, and the sum of gradients per token.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::model {

// out[t] = table[token[t]]. Table and out: storage dtype; tokens int32 in [0, V), checked.
struct EmbeddingArgs {
  TensorView table_VD;
  TensorView token_T;
  TensorView out_TD;
};
void embedding(const EmbeddingArgs& args, Stream stream);

// grad[v] (+)= sum over t with token[t] = v of dout[t]. The sum runs over blocks of 64 occurrences
// in ascending t, then over the block sums ascending, all in fp32, and is then added to grad
// (`accumulate`) or replaces it (rows of absent tokens become 0).
struct EmbeddingBackwardArgs {
  TensorView dout_TD;  // storage
  TensorView token_T;
  TensorView grad_VD;    // fp32
  TensorView workspace;  // int64 [T]
  bool accumulate = false;
};
void embedding_backward(const EmbeddingBackwardArgs& args, Stream stream);

}  // namespace moiety::model
