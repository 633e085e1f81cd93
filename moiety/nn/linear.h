// A linear layer without bias, y = x w^T, and its backward pass, by the products of gemm.h.
#pragma once

#include "moiety/gemm/gemm.h"

namespace moiety::nn {

// y = round(x w^T + residual), with x [T, K], w [N, K], y [T, N]. y is storage or fp32; the
// residual is optional, storage or fp32, and may be y.
inline void linear(TensorView x, TensorView w, TensorView y, TensorView residual, Stream stream) {
  gemm::gemm({.op = gemm::GemmOp::kTN,
              .a = x,
              .b = w,
              .out = y,
              .beta = residual.defined() ? 1.0f : 0.0f,
              .c = residual},
             stream);
}

// dx = round(dy w + addend); the addend is optional and may be dx.
inline void linear_input_gradient(TensorView dy, TensorView w, TensorView dx, TensorView addend,
                                  Stream stream) {
  gemm::gemm({.op = gemm::GemmOp::kNN,
              .a = dy,
              .b = w,
              .out = dx,
              .beta = addend.defined() ? 1.0f : 0.0f,
              .c = addend},
             stream);
}

// grad = dy^T x, added to the old grad if `accumulate`. grad [N, K] is fp32 or bf16.
inline void linear_weight_gradient(TensorView dy, TensorView x, TensorView grad, bool accumulate,
                                   Stream stream) {
  gemm::gemm({.op = gemm::GemmOp::kNT,
              .a = dy,
              .b = x,
              .out = grad,
              .beta = accumulate ? 1.0f : 0.0f,
              .c = {}},
             stream);
}

}  // namespace moiety::nn
