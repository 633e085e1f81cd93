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

constexpr int kSumLoaders = 8, kSumEach = 24;  // warps that load, and loads of each in flight
constexpr int kSumThreads = 32 * (1 + kSumLoaders), kSumTile = kSumLoaders * kSumEach;

// A lane has a column of one of the sums, which share the thread blocks. Additions wait for each
// other, so that one warp makes them all; the others bring a tile of blocks while it adds the one
// before. A block that does not exist counts as +0 and changes nothing, since no sum is -0.
template <size_t kSums>
__global__ void __launch_bounds__(kSumThreads)
    sum_norm_blocks(const __grid_constant__ std::array<NormSum, kSums> sums, int64_t n) {
  __shared__ float tiles[2][kSumTile][32];
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const unsigned of_each = gridDim.x / kSums;
  const NormSum& mine = sums[blockIdx.x / of_each];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t c = int64_t{blockIdx.x % of_each} * 32 + lane;
  float ahead[kSumEach];
  const auto load = [&](int64_t tile) {
    const int64_t first = tile * kSumTile + (warp - 1) * kSumEach;
    const float* from = mine.partial + first * n + c;
#pragma unroll
    for (int i = 0; i < kSumEach; ++i, from += n) {
      ahead[i] = c < n && first + i < mine.blocks ? *from : 0.0f;
    }
  };
  const int64_t count = (mine.blocks + kSumTile - 1) / kSumTile;
  if (warp > 0) load(0);
  float sum = 0;
  for (int64_t tile = 0; tile <= count; ++tile) {
    if (warp > 0) {
#pragma unroll
      for (int i = 0; i < kSumEach; ++i) {
        tiles[tile % 2][(warp - 1) * kSumEach + i][lane] = ahead[i];
      }
      if (tile + 1 < count) load(tile + 1);
    } else if (tile > 0) {
#pragma unroll 32
      for (int i = 0; i < kSumTile; ++i) sum += tiles[(tile - 1) % 2][i][lane];
    }
    __syncthreads();
  }
  if (warp == 0 && c < n) mine.grad[c] = mine.accumulate ? mine.grad[c] + sum : sum;
}

}  // namespace moiety::nn::device
