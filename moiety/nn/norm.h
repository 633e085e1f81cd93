// RMSNorm (Zhang and Sennrich, 2019) over rows: r = 1/sqrt(mean_d x^2 + eps), y = x r g, and its
// backward pass. The same operation normalizes tokens (rows of D) and heads (rows of C, all with
// one g).
//
// x, y, dy and dx have the storage dtype and the same sizes, in any number of dimensions. The last
// dimension is the row and is contiguous; the others may be strided and are counted row-major.
// Arithmetic is fp32; row sums take the order of base/math's lane_sum with fma; every stored
// element is rounded once.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/quant/amax_sink.h"

namespace moiety::nn {

struct NormArgs {
  TensorView x;
  TensorView weight_D;  // storage
  TensorView y;         // may be x
  float eps = 1e-6f;
  quant::AmaxSink sink = {};  // optional, [1]: the amax of y
};
void norm(const NormArgs& args, Stream stream);

// With u = g dy: dx = addend + (r u - (r^3/D) x sum_d(u x)) and grad (+)= sum_rows dy x r. The sum
// over rows has the order of norm_order.
struct NormBackwardArgs {
  TensorView x;
  TensorView weight_D;
  TensorView dy;
  TensorView addend;     // optional, storage: the gradient that bypasses the norm
  TensorView dx;         // may be dy or addend
  TensorView grad_D;     // fp32
  TensorView workspace;  // fp32 [norm_blocks(rows, D), D]
  float eps = 1e-6f;
  bool accumulate = false;  // add to grad instead of overwriting it
};
void norm_backward(const NormBackwardArgs& args, Stream stream);

// The order of a sum over rows of n elements: rows whose numbers are equal modulo `classes` are
// added in ascending order, then the classes of each run of `run` neighbours, then the runs; all
// from +0. So as many threads as there are classes can each keep a sum while neighbouring rows are
// read at the same time.
struct NormOrder {
  int64_t classes, run;
};
constexpr NormOrder norm_order(int64_t n) {
  return n <= 256 ? NormOrder{8192, 16} : NormOrder{128, 1};
}
// The runs that have rows.
constexpr int64_t norm_blocks(int64_t rows, int64_t n) {
  const NormOrder order = norm_order(n);
  const int64_t runs = (rows + order.run - 1) / order.run, most = order.classes / order.run;
  return runs < most ? runs : most;
}

// The scalar reference (also double) and the fast paths, which give the same bits.
void norm_ref(const NormArgs& args);
void norm_backward_ref(const NormBackwardArgs& args);
void norm_cpu(const NormArgs& args);
void norm_backward_cpu(const NormBackwardArgs& args);
void norm_cuda(const NormArgs& args, const Stream& stream);
void norm_backward_cuda(const NormBackwardArgs& args, const Stream& stream);

}  // namespace moiety::nn
