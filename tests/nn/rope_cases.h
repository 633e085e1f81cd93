// RopeHeads that are rotated, on a CPU and on a GPU.
#pragma once

#include "moiety/nn/rope.h"
#include "tests/support/tensors.h"

namespace moiety::nn {

// [tokens, 2, 3, head_dim] cut out of [tokens, 2, 4, head_dim].
struct RopeHeads {
  RopeHeads(DType dtype, int64_t tokens, int64_t head_dim, unsigned seed)
      : storage(normal_tensor(dtype, {tokens, 2, 4, head_dim}, seed)),
        view(storage.view().slice(2, 0, 3)) {}
  Tensor storage;
  TensorView view;
};

inline constexpr int64_t kHeadDims[] = {2, 8, 10, 64, 128, 254};

}  // namespace moiety::nn
