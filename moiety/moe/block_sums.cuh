// How thread blocks add sums over blocks of tokens.
#pragma once

#include "moiety/base/integer.h"
#include "moiety/moe/router.h"

namespace moiety::moe::detail {

constexpr int64_t column_groups(const BlockSums& p) { return ceil_div(p.columns, 32); }
constexpr int64_t thread_blocks(const BlockSums& p) { return p.segments * column_groups(p); }

// Sums the blocks in ascending order, for 32 columns of a segment, of which thread block `index` has
// one. All of its threads call it.
template <int kThreads>
__device__ void add_blocks(const BlockSums& p, int64_t index) {
  constexpr int kWarps = kThreads / 32, kRows = 128;
  __shared__ float tile[kRows][32];
  __shared__ int64_t counts[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t groups = column_groups(p), segment = index / groups;
  const int64_t column = (index - segment * groups) * 32 + lane;
  const bool exists = column < p.columns;
  const int64_t from = segment * p.rows * p.columns + (exists ? column : 0);
  int64_t count = 0;
  double sum = 0;
  for (int64_t first = 0; first < p.rows; first += kRows) {
    const int rows = static_cast<int>(min(int64_t{kRows}, p.rows - first));
#pragma unroll 8
    for (int r = warp; r < rows; r += kWarps) {
      tile[r][lane] = p.block_sum[from + (first + r) * p.columns];
      count += p.block_count[from + (first + r) * p.columns];
    }
    __syncthreads();
    if (warp == 0) {
#pragma unroll 8
      for (int r = 0; r < rows; ++r) sum += tile[r][lane];
    }
    __syncthreads();
  }
  counts[warp][lane] = count;
  __syncthreads();
  if (warp != 0 || !exists) return;
  for (int w = 1; w < kWarps; ++w) count += counts[w][lane];
  p.count[segment * p.columns + column] = count;
  p.sum[segment * p.columns + column] = sum;
}

}  // namespace moiety::moe::detail
