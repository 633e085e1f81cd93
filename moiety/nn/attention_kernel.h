// Which of Moiety's kernels compute attention on a GPU: pure choices from lists of all kernels, so
// that tests hold them without a GPU. attention_tiles_cuda.cu and attention_plain_cuda.cu
// instantiate the lists. Internal to moiety/nn.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "moiety/nn/attention_cuda.h"

namespace moiety::nn {

enum class AttentionPass : uint8_t {
  kForward,
  kDots,  // delta, where kQueryGradient does not find it
  kQueryGradient,
  kKeyGradient,  // after the passes that find delta
};

struct AttentionKernel {
  AttentionPath path;
  AttentionPass pass;
  DType dtype;
  int64_t head_dim = 0;  // 0: any
  friend constexpr bool operator==(const AttentionKernel&, const AttentionKernel&) = default;
};

// Tensor cores: bf16, all addresses and strides multiples of 16 bytes.
inline constexpr auto kTileAttention = [] {
  std::array<AttentionKernel, 12> out{};
  size_t n = 0;
  for (const int64_t head_dim : {32, 64, 128}) {
    for (const AttentionPass pass : {AttentionPass::kForward, AttentionPass::kDots,
                                     AttentionPass::kQueryGradient, AttentionPass::kKeyGradient}) {
      out.at(n++) = {AttentionPath::kTiles, pass, DType::kBFloat16, head_dim};
    }
  }
  return out;
}();
// All other jobs: a warp for every query or key.
inline constexpr auto kPlainAttention = [] {
  std::array<AttentionKernel, 6> out{};
  size_t n = 0;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const AttentionPass pass :
         {AttentionPass::kForward, AttentionPass::kQueryGradient, AttentionPass::kKeyGradient}) {
      out.at(n++) = {AttentionPath::kPlain, pass, dtype};
    }
  }
  return out;
}();

// Throws Error(kUnsupported) for fp64, which is for CPUs.
AttentionJob job_of(const AttentionArgs& args);
AttentionJob job_of(const AttentionBackwardArgs& args);

// Whether the dtype, addresses and strides suit tensor cores, Moiety's and cuDNN's.
bool suits_tensor_cores(const AttentionJob& job);

// The kernels of a job that cuDNN does not take, in the order of their launches.
std::vector<AttentionKernel> choose_kernels(const AttentionJob& job);

}  // namespace moiety::nn
