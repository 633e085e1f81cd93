// Causal attention as a cuDNN graph. cuDNN's fused kernels recognize the graph by its operations,
// in this order. Internal to moiety/nn; only for builds that have cuDNN's headers.
#pragma once

#include "moiety/nn/cudnn_graph.h"

namespace moiety::nn {

// Distances in elements between neighbours of [batch, heads, length, C]; C is contiguous.
struct SdpaStrides {
  int64_t batch = 0, head = 0, row = 0;
  auto operator<=>(const SdpaStrides&) const = default;
};

// A shape: batch x heads query heads in bf16, where heads / kv_heads neighbours share a key/value
// head. lse and delta are packed.
struct SdpaShape {
  bool backward = false;
  int64_t batch = 0, heads = 0, kv_heads = 0, length = 0, head_dim = 0;
  SdpaStrides q, k, v, o;
  SdpaStrides d_out, dq, dk, dv;  // backward
  auto operator<=>(const SdpaShape&) const = default;
};

enum SdpaTensor : int64_t {
  kQ = 1,
  kK,
  kV,
  kO,
  kLse,
  kScale,          // by value: C^(-1/2)
  kMinusInfinity,  // by value
  kDOut,           // from here on only in backward
  kDelta,
  kDq,
  kDk,
  kDv,
  kOne,  // by value
};

// Makes the plan. Backward keeps dS, batch x heads x length^2 values of bf16, in its workspace,
// which makes it deterministic. Throws what CudnnGraph::plan throws.
CudnnPlan sdpa_plan(cudnnHandle_t handle, const SdpaShape& shape);

}  // namespace moiety::nn
