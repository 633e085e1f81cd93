#include "moiety/nn/norm_rope.h"

#include <cmath>

#include "moiety/base/cuda_built.h"
#include "moiety/nn/element.h"
#include "moiety/nn/norm.h"
#include "moiety/nn/rope.h"

namespace moiety::nn {
namespace {

TensorView queries(const TensorView& x_TGNC) { return x_TGNC.slice(2, 0, x_TGNC.size(2) - 1); }
TensorView keys(const TensorView& x_TGNC) {
  return x_TGNC.slice(2, x_TGNC.size(2) - 1, x_TGNC.size(2));
}

void check_heads(const char* operation, const char* argument, const TensorView& y,
                 const TensorView& x) {
  check_tensor(operation, argument, y, x.dtype(), {x.size(0), x.size(1), x.size(2), x.size(3)});
  MOIETY_CHECK(y.stride(3) == 1, "{}: {} is {}: a head must be contiguous", operation, argument,
               y.describe());
}

// Args is one of the two structs; y the tensor that the heads are written to.
template <class Args>
void check(const char* operation, const Args& a, const TensorView& y) {
  const TensorView& x = a.x_TGNC;
  check_element(operation, x.dtype());
  check_tensor(operation, "x", x, x.dtype(), {-1, -1, -1, -1});
  const int64_t head_dim = x.size(3);
  MOIETY_CHECK(x.size(2) >= 2 && head_dim >= 2 && head_dim % 2 == 0,
               "{}: x is {}: a group has query heads and a key head, of an even size", operation,
               x.describe());
  check_heads(operation, "x", x, x);
  check_heads(operation, "y", y, x);
  check_tensor(operation, "q_weight", a.q_weight_C, x.dtype(), {head_dim});
  check_tensor(operation, "k_weight", a.k_weight_C, x.dtype(), {head_dim});
  const HeadAngles& angles = a.angles;
  check_tensor(operation, "table", angles.table, DType::kFloat32, {-1, 2, head_dim / 2});
  MOIETY_CHECK(angles.table.contiguous(), "{}: table is {}", operation, angles.table.describe());
  if (angles.position_T.defined()) {
    check_tensor(operation, "position", angles.position_T, DType::kInt32, {x.size(0)});
    MOIETY_CHECK(angles.position_T.contiguous(), "{}: position is {}", operation,
                 angles.position_T.describe());
  } else {
    MOIETY_CHECK(angles.seq_len >= 1 && angles.seq_len <= angles.table.size(0),
                 "{}: seq_len={}, the table has {}", operation, angles.seq_len,
                 angles.table.size(0));
  }
}

RopeArgs rotation(const TensorView& x_TGNC, const HeadAngles& angles, bool inverse) {
  return {x_TGNC, angles.table, angles.position_T, angles.seq_len, inverse};
}

}  // namespace

int64_t norm_rope_blocks(int64_t tokens, int64_t groups, int64_t heads_a_group, int64_t head_dim) {
  return norm_blocks(tokens * groups * (heads_a_group - 1), head_dim) +
         norm_blocks(tokens * groups, head_dim);
}

void norm_then_rope(const NormRopeArgs& a, const Stream& stream) {
  norm({queries(a.x_TGNC), a.q_weight_C, queries(a.y_TGNC), a.eps}, stream);
  norm({keys(a.x_TGNC), a.k_weight_C, keys(a.y_TGNC), a.eps}, stream);
  rope(rotation(a.y_TGNC, a.angles, false), stream);
}

void rope_then_norm_backward(const NormRopeBackwardArgs& a, const Stream& stream) {
  const TensorView dq = queries(a.d_TGNC), dk = keys(a.d_TGNC);
  const int64_t blocks = a.workspace.size(0),
                split = blocks - norm_blocks(dk.size(0) * dk.size(1), dk.size(-1));
  rope(rotation(a.d_TGNC, a.angles, true), stream);
  norm_backward({queries(a.x_TGNC),
                 a.q_weight_C,
                 dq,
                 {},
                 dq,
                 a.q_grad_C,
                 a.workspace.slice(0, 0, split),
                 a.eps,
                 a.q_accumulate},
                stream);
  norm_backward({keys(a.x_TGNC),
                 a.k_weight_C,
                 dk,
                 {},
                 dk,
                 a.k_grad_C,
                 a.workspace.slice(0, split, blocks),
                 a.eps,
                 a.k_accumulate},
                stream);
}

void norm_rope(const NormRopeArgs& a, Stream stream) {
  check("norm_rope", a, a.y_TGNC);
  const bool gpu = on_gpu("norm_rope", a.x_TGNC.dtype(),
                          {{"x", a.x_TGNC},
                           {"q_weight", a.q_weight_C},
                           {"k_weight", a.k_weight_C},
                           {"y", a.y_TGNC},
                           {"table", a.angles.table},
                           {"position", a.angles.position_T}},
                          stream);
  if constexpr (kCudaBuilt) {
    if (gpu && one_pass(a)) return norm_rope_cuda(a, stream);
  }
  norm_then_rope(a, stream);
}

void norm_rope_backward(const NormRopeBackwardArgs& a, Stream stream) {
  const char* operation = "norm_rope_backward";
  check(operation, a, a.d_TGNC);
  const TensorView& x = a.x_TGNC;
  const DType compute = compute_dtype(x.dtype());
  check_tensor(operation, "q_grad", a.q_grad_C, compute, {x.size(3)});
  check_tensor(operation, "k_grad", a.k_grad_C, compute, {x.size(3)});
  check_tensor(operation, "workspace", a.workspace, compute,
               {norm_rope_blocks(x.size(0), x.size(1), x.size(2), x.size(3)), x.size(3)});
  const bool gpu = on_gpu(operation, x.dtype(),
                          {{"x", x},
                           {"q_weight", a.q_weight_C},
                           {"k_weight", a.k_weight_C},
                           {"d", a.d_TGNC},
                           {"q_grad", a.q_grad_C},
                           {"k_grad", a.k_grad_C},
                           {"workspace", a.workspace},
                           {"table", a.angles.table},
                           {"position", a.angles.position_T}},
                          stream);
  if constexpr (kCudaBuilt) {
    if (gpu && one_pass(a)) return norm_rope_backward_cuda(a, stream);
  }
  rope_then_norm_backward(a, stream);
}

}  // namespace moiety::nn
