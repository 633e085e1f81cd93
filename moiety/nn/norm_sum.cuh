// The last step of a norm's backward pass: it adds what blocks of rows contribute to the gradient of
// the weight, in ascending order.
#pragma once

#include <array>
#include <cstdint>

namespace moiety::nn::device {

struct NormSum {
  const float* partial;  // [blocks, n]
  int64_t blocks;
  float* grad;  // [n]
  bool accumulate;
};

// A lane has a column of one of the sums, which share the thread blocks of 32. Additions wait for
// each other while loads run ahead of them. A block that does not exist counts as +0 and changes
// nothing, since no sum is -0.
template <size_t kSums>
__global__ void __launch_bounds__(32)
    sum_norm_blocks(const __grid_constant__ std::array<NormSum, kSums> sums, int64_t n) {
  constexpr int kAhead = 96;
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const unsigned of_each = gridDim.x / kSums;
  const NormSum& mine = sums[blockIdx.x / of_each];
  const int64_t c = int64_t{blockIdx.x % of_each} * 32 + threadIdx.x;
  if (c >= n) return;
  const float* next = mine.partial + c;
  float ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i, next += n) ahead[i] = i < mine.blocks ? *next : 0.0f;
  float sum = 0;
  int64_t left = mine.blocks - kAhead;  // blocks still to load
  for (; left >= kAhead; left -= kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i, next += n) {
      sum += ahead[i];
      ahead[i] = *next;
    }
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i, next += n) {
    sum += ahead[i];
    ahead[i] = i < left ? *next : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i) sum += ahead[i];
  mine.grad[c] = mine.accumulate ? mine.grad[c] + sum : sum;
}

}  // namespace moiety::nn::device
