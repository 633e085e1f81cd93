// Cases of cross-entropy, on a CPU and on a GPU.
#pragma once

#include "moiety/nn/loss.h"
#include "tests/support/tensors.h"

namespace moiety::nn {

struct LossCase {
  const char* name;
  int64_t tokens, vocabulary, d_model, chunk;
  float z_coef = 0;
  bool mask = false;
};

const LossCase kLossCases[] = {
    {"no_tokens", 0, 7, 8, 4},
    {"one_token", 1, 257, 8, 1},
    {"two_words", 5, 2, 8, 5},
    {"odd_vocabulary", 33, 257, 16, 33, 1e-2f},
    {"several_chunks", 50, 300, 24, 16, 0, true},
    {"chunk_of_one", 6, 40, 8, 1, 0.1f, true},
};

struct LossProblem {
  LossProblem(const LossCase& c_in, DType dtype)
      : c(c_in),
        x(normal_tensor(dtype, {c.tokens, c.d_model}, 1)),
        head(normal_tensor(dtype, {c.vocabulary, c.d_model}, 2)),
        mask(DType::kUInt8, {c.tokens}),
        loss(compute_dtype(dtype), {c.tokens}),
        dx(dtype, {c.tokens, c.d_model}),
        grad(normal_tensor(compute_dtype(dtype), {c.vocabulary, c.d_model}, 3)),
        workspace(compute_dtype(dtype), {c.chunk, c.vocabulary}) {
    std::vector<int32_t> t;
    for (int64_t i = 0; i < c.tokens; ++i) {
      t.push_back(i % 7 == 5 ? kIgnoredTarget : static_cast<int32_t>(i * 31 % c.vocabulary));
      mask.data<uint8_t>()[i] = i % 3 != 1;
    }
    target = int32_tensor(t);
  }
  bool valid(int64_t t) const {
    return target.data<int32_t>()[t] != kIgnoredTarget && !(c.mask && t % 3 == 1);
  }
  TensorView mask_view() const { return c.mask ? mask.view() : TensorView(); }
  LinearCrossEntropyArgs args(bool backward, bool accumulate = false) const {
    LinearCrossEntropyArgs a{x,  head, target,    mask_view(), loss,
                             {}, {},   workspace, c.z_coef,    accumulate};
    if (backward) {
      a.dx_TD = dx;
      a.grad_VD = grad;
    }
    return a;
  }
  LossCase c;
  Tensor x, head, target, mask, loss, dx, grad, workspace;
};

}  // namespace moiety::nn
