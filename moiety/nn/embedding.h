// Token embedding: a look-up of rows of a table, and the sum of gradients per token.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::nn {

// The part of a larger table, of `vocabulary` rows, that this one is: rows [first, first + V). With
// vocabulary 0 the table is whole. Tokens are int32 in [0, vocabulary); any other is an error on a
// CPU, and on a GPU gives a row of NaN and no gradient.
struct VocabularySlice {
  int64_t first = 0;
  int64_t vocabulary = 0;
};

// out[t] = table[token[t]], or 0 if the token belongs to another slice. Table and out have the
// storage dtype.
struct EmbeddingArgs {
  TensorView table_VD;
  TensorView token_T;
  TensorView out_TD;
  VocabularySlice slice = {};
};
void embedding(const EmbeddingArgs& args, Stream stream);

// grad[v] (+)= sum of dout[t] over the t with token[t] = first + v. The occurrences are summed in
// blocks of 64, in ascending t, then the blocks' sums in ascending order, all in fp32; the result
// is added to grad (`accumulate`) or replaces it (rows of absent tokens become 0).
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
