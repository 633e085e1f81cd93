#include "moiety/nn/embedding.h"

#include <algorithm>
#include <cstring>

#include "moiety/base/cuda_built.h"
#include "moiety/base/parallel.h"
#include "moiety/base/trace.h"
#include "moiety/nn/element.h"
#include "moiety/nn/embedding_sum.h"
#include "moiety/nn/scratch.h"

namespace moiety::nn {
namespace {

void check_tokens(const char* operation, const TensorView& token_T, const VocabularySlice& slice,
                  int64_t rows) {
  const int64_t vocabulary = slice.vocabulary > 0 ? slice.vocabulary : rows;
  const int32_t* token = token_T.data<int32_t>();
  for (int64_t t = 0; t < token_T.numel(); ++t) {
    MOIETY_CHECK(token[t] >= 0 && token[t] < vocabulary,
                 "{}: token {} at position {} is outside the vocabulary of {}", operation, token[t],
                 t, vocabulary);
  }
}

template <class T>
void backward(const EmbeddingBackwardArgs& a) {
  using A = Compute<T>;
  const int64_t tokens = a.token_T.size(0), d_model = a.dout_TD.size(1);
  const int64_t vocabulary = a.grad_VD.size(0);
  const T* dout = a.dout_TD.data<T>();
  A* grad = a.grad_VD.data<A>();
  // The keys are sorted by (token, position), since one key holds both.
  int64_t* key = a.workspace.data<int64_t>();
  for (int64_t t = 0; t < tokens; ++t) {
    key[t] = occurrence(a.token_T.data<int32_t>()[t], t);
  }
  std::sort(key, key + tokens);
  parallel_for(vocabulary, 64, [&](int64_t begin, int64_t end) {
    A* block = thread_scratch<A>(2 * d_model);
    A* sum = block + d_model;
    const int64_t token0 = a.slice.first;  // token of row 0
    const int64_t* next = std::lower_bound(key, key + tokens, occurrence(token0 + begin, 0));
    for (int64_t v = begin; v < end; ++v) {
      const int64_t* first = next;
      while (next < key + tokens && row_of_occurrence(*next) == token0 + v) ++next;
      A* row = grad + v * d_model;
      if (first == next) {
        if (!a.accumulate) std::fill_n(row, d_model, A(0));
        continue;
      }
      sum_occurrences(dout, d_model, d_model, first, next, block, sum);
      for (int64_t d = 0; d < d_model; ++d) row[d] = a.accumulate ? row[d] + sum[d] : sum[d];
    }
  });
}

}  // namespace

void embedding(const EmbeddingArgs& a, Stream stream) {
  check_element("embedding", a.table_VD.dtype());
  check_tensor("embedding", "table", a.table_VD, a.table_VD.dtype(), {-1, -1});
  check_tensor("embedding", "token", a.token_T, DType::kInt32, {-1});
  check_tensor("embedding", "out", a.out_TD, a.table_VD.dtype(),
               {a.token_T.size(0), a.table_VD.size(1)});
  MOIETY_CHECK(a.table_VD.contiguous() && a.token_T.contiguous() && a.out_TD.contiguous(),
               "embedding: table, token and out must be contiguous");
  if (on_gpu("embedding", a.table_VD.dtype(),
             {{"table", a.table_VD}, {"token", a.token_T}, {"out", a.out_TD}}, stream)) {
    if constexpr (kCudaBuilt) return embedding_cuda(a, stream);
    fail_without_cuda("embedding");
  }
  stream.run([=] {
    const TraceSpan span(TraceLane::kCompute, "embedding", {{"tokens", a.token_T.size(0)}});
    check_tokens("embedding", a.token_T, a.slice, a.table_VD.size(0));
    const int64_t row = byte_size(a.table_VD.dtype(), a.table_VD.size(1));
    const auto* table = static_cast<const std::byte*>(a.table_VD.raw());
    auto* out = static_cast<std::byte*>(a.out_TD.raw());
    for (int64_t t = 0; t < a.token_T.size(0); ++t) {
      const int64_t v = a.token_T.data<int32_t>()[t] - a.slice.first;
      if (v >= 0 && v < a.table_VD.size(0)) {
        std::memcpy(out + t * row, table + v * row, row);
      } else {
        std::memset(out + t * row, 0, row);
      }
    }
  });
}

void embedding_backward(const EmbeddingBackwardArgs& a, Stream stream) {
  check_element("embedding_backward", a.dout_TD.dtype());
  check_tensor("embedding_backward", "dout", a.dout_TD, a.dout_TD.dtype(), {-1, -1});
  check_tensor("embedding_backward", "token", a.token_T, DType::kInt32, {a.dout_TD.size(0)});
  check_tensor("embedding_backward", "grad", a.grad_VD, compute_dtype(a.dout_TD.dtype()),
               {-1, a.dout_TD.size(1)});
  check_tensor("embedding_backward", "workspace", a.workspace, DType::kInt64, {a.dout_TD.size(0)});
  MOIETY_CHECK(a.dout_TD.contiguous() && a.token_T.contiguous() && a.grad_VD.contiguous(),
               "embedding_backward: dout, token and grad must be contiguous");
  if (on_gpu("embedding_backward", a.dout_TD.dtype(),
             {{"dout", a.dout_TD},
              {"token", a.token_T},
              {"grad", a.grad_VD},
              {"workspace", a.workspace}},
             stream)) {
    if constexpr (kCudaBuilt) return embedding_backward_cuda(a, stream);
    fail_without_cuda("embedding_backward");
  }
  stream.run([=] {
    const TraceSpan span(TraceLane::kCompute, "embedding_backward",
                         {{"tokens", a.token_T.size(0)}});
    check_tokens("embedding_backward", a.token_T, a.slice, a.grad_VD.size(0));
    with_element(a.dout_TD.dtype(), [&](auto element) { backward<decltype(element)>(a); });
  });
}

}  // namespace moiety::nn
