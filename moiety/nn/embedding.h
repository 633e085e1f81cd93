// Token embedding: rows of a table, and the sum of gradients per token.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::nn {

// A table may be rows [first, first + V) of a larger one, of `vocabulary` rows; vocabulary 0: it is
// whole. Tokens: int32 in [0, vocabulary); another is an error, on a GPU a row of NaN without a
// gradient.
struct VocabularySlice {
  int64_t first = 0;
  int64_t vocabulary = 0;
};

// out[t] = table[token[t]]; 0 for the tokens of other slices. Table and out: storage dtype.
struct EmbeddingArgs {
  TensorView table_VD;
  TensorView token_T;
  TensorView out_TD;
  VocabularySlice slice = {};
};
void embedding(const EmbeddingArgs& args, Stream stream);

// grad[v] (+)= sum over t with token[t] = first + v of dout[t]. The sum runs over blocks of 64
// occurrences in ascending t, then over the block sums ascending, all in fp32, and is then added to
// grad (`accumulate`) or replaces it (rows of absent tokens become 0).
struct EmbeddingBackwardArgs {
  TensorView dout_TD;  // storage
  TensorView token_T;
  TensorView grad_VD;    // fp32
  TensorView workspace;  // int64 [T]
  bool accumulate = false;
  VocabularySlice slice = {};
};
void embedding_backward(const EmbeddingBackwardArgs& args, Stream stream);

// The same bits on a GPU.
void embedding_cuda(const EmbeddingArgs& args, const Stream& stream);
void embedding_backward_cuda(const EmbeddingBackwardArgs& args, const Stream& stream);

}  // namespace moiety::nn
