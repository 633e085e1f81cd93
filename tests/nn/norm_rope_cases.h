// Cases of norm and rope in one pass, on a CPU and on a GPU.
#pragma once

#include "moiety/nn/norm_rope.h"
#include "moiety/nn/rope.h"
#include "tests/support/tensors.h"

namespace moiety::nn {

struct NormRopeCase {
  const char* name;
  int64_t tokens, groups, queries, head_dim;  // queries: heads of a group
  bool positions = false;                     // else sequences of kSeqLen
  bool accumulate = false;
};

// Blocks of 64 heads end inside tokens and groups, and tokens inside batches of heads.
const NormRopeCase kNormRopeCases[] = {
    {"no_tokens", 0, 2, 3, 64},
    {"one_token", 1, 1, 1, 64},
    {"small_heads", 37, 2, 3, 16, true, true},
    {"odd_heads", 20, 1, 2, 10},
    {"heads_of_64", 70, 2, 4, 64, false, true},
    {"heads_of_64_alone", 131, 1, 1, 64, true},
    {"heads_of_128", 70, 4, 8, 128, true, true},
    {"three_groups_of_five", 67, 3, 5, 128},
    {"heads_of_256", 40, 1, 3, 256, true},
};

struct NormRopeProblem {
  static constexpr int64_t kSeqLen = 35, kPositions = 50;

  NormRopeProblem(const NormRopeCase& c_in, DType dtype)
      : c(c_in),
        x(heads(dtype, 1)),
        y(heads(dtype, 2)),
        d(heads(dtype, 3)),
        q_weight(normal_tensor(dtype, {c.head_dim}, 4)),
        k_weight(normal_tensor(dtype, {c.head_dim}, 5)),
        q_grad(normal_tensor(compute(dtype), {c.head_dim}, 6)),
        k_grad(normal_tensor(compute(dtype), {c.head_dim}, 7)),
        workspace(compute(dtype),
                  {norm_rope_blocks(c.tokens, c.groups, c.queries + 1, c.head_dim), c.head_dim}),
        table(rope_table(kPositions, c.head_dim, 1e4)) {
    std::vector<int32_t> positions;
    for (int64_t t = 0; t < c.tokens; ++t) positions.push_back(int32_t(t * 37 % kPositions));
    position = int32_tensor(positions);
  }
  NormRopeArgs forward() const { return {view(x), q_weight, k_weight, view(y), angles(), 1e-3f}; }
  NormRopeBackwardArgs backward() const {
    return {view(x),   q_weight, k_weight, view(d),      q_grad,      k_grad,
            workspace, angles(), 1e-3f,    c.accumulate, c.accumulate};
  }
  HeadAngles angles() const {
    return {table, c.positions ? position.view() : TensorView(), c.positions ? 0 : kSeqLen};
  }
  // q and k of a projection that also has v.
  TensorView view(const Tensor& all) const { return all.view().slice(2, 0, c.queries + 1); }

  NormRopeCase c;
  Tensor x, y, d, q_weight, k_weight, q_grad, k_grad, workspace, table, position;

 private:
  static DType compute(DType d) { return d == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }
  Tensor heads(DType dtype, unsigned seed) const {
    return normal_tensor(dtype, {c.tokens, c.groups, c.queries + 2, c.head_dim}, seed);
  }
};

}  // namespace moiety::nn
