// Each row is a warp's. Sums of exponentials are taken in the order of lane_sum (base/math.h): lane l
// adds the elements 8 l ... 8 l + 7 of each 256.
#include "moiety/base/launch.cuh"
#include "moiety/base/math.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp32.h"
#include "moiety/model/parallel_loss_rows.h"
#include "moiety/nn/element.h"

namespace moiety::model {
namespace {

constexpr int kThreads = 256, kRows = kThreads / 32;  // rows of a block
constexpr int64_t kGroup = 256;
constexpr int kEach = 8;  // elements of a lane in a group
constexpr uint32_t kWarp = 0xFFFFFFFFu;

__global__ void __launch_bounds__(kThreads) targets_kernel(const TargetChunk c, int64_t rows) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n < rows) c.out[n] = c.at(c.token(n));
}

__device__ int64_t row_of_warp() { return int64_t{blockIdx.x} * kRows + threadIdx.x / 32; }

__global__ void __launch_bounds__(kThreads) maxima_kernel(const LossRows c) {
  const int64_t n = row_of_warp();
  if (n >= c.rows) return;
  const int lane = threadIdx.x % 32;
  const float* z = c.logits + n * c.columns;
  float max = -INFINITY;
  for (int64_t v = lane; v < c.columns; v += 32) max = fmaxf(max, z[v]);
#pragma unroll
  for (int o = 16; o >= 1; o /= 2) max = fmaxf(max, __shfl_xor_sync(kWarp, max, o));
  if (lane == 0) c.max[n] = max;
}

__global__ void __launch_bounds__(kThreads) sums_kernel(const LossRows c) {
  const int64_t n = row_of_warp();
  if (n >= c.rows) return;
  const int lane = threadIdx.x % 32;
  float* z = c.logits + n * c.columns;
  const float max = c.max[n];
  if (lane == 0) {
    const int64_t y = c.target[n] == nn::kIgnoredTarget ? -1 : c.target[n] - c.first;
    c.sum[c.rows + n] = y >= 0 && y < c.columns ? z[y] : 0.0f;
  }
  __syncwarp();
  float sum = 0;
  for (int64_t group = 0; group < c.columns; group += kGroup) {
    const int64_t begin = group + kEach * lane;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (begin + j >= c.columns) continue;
      const float e = exp_nonpositive(z[begin + j] - max);
      z[begin + j] = e;
      sum += e;
    }
  }
#pragma unroll
  for (int o = 16; o >= 1; o /= 2) sum += __shfl_xor_sync(kWarp, sum, o);
  if (lane == 0) c.sum[n] = sum;
}

// The gradient's elements lie before the exponentials that they are made of, or in their place, so a
// warp writes nothing that it has still to read.
template <class T>
__device__ void write_gradient(const LossRows& c, int64_t n, float factor, int64_t y) {
  const int lane = threadIdx.x % 32;
  const float* e = c.logits + n * c.columns;
  T* dz = reinterpret_cast<T*>(c.logits + n * c.columns);
  for (int64_t group = 0; group < c.columns; group += 32) {
    const int64_t v = group + lane;
    const float x = v < c.columns ? factor * e[v] : 0.0f;
    __syncwarp();
    if (v < c.columns) dz[v] = T(v == y ? x - 1 : x);
    __syncwarp();
  }
}

template <class T>
__device__ void fill_gradient(const LossRows& c, int64_t n, float value) {
  T* dz = reinterpret_cast<T*>(c.logits + n * c.columns);
  for (int64_t v = threadIdx.x % 32; v < c.columns; v += 32) dz[v] = T(value);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const LossRows c, float z_coef, bool gradient) {
  const int64_t n = row_of_warp();
  if (n >= c.rows) return;
  const bool first = threadIdx.x % 32 == 0;
  const int32_t target = c.target[n];
  const bool counts = target != nn::kIgnoredTarget;
  if (!counts || target < 0 || target >= c.tokens_of) {
    const float value = counts ? kCanonicalNan : 0.0f;
    if (first) c.loss[n] = value;
    if (gradient) fill_gradient<T>(c, n, value);
    return;
  }
  const float lse = c.max[n] + log(c.sum[n]);
  if (first) c.loss[n] = lse - c.sum[c.rows + n];
  if (!gradient) return;
  write_gradient<T>(c, n, (1 + 2 * z_coef * lse) * (1 / c.sum[n]), target - c.first);
}

LaunchShape a_warp_each(const LossRows& rows) { return {blocks_for(rows.rows, kRows), kThreads}; }

}  // namespace

void pick_targets_cuda(const TargetChunk& chunk, const Stream& stream) {
  const int64_t rows = chunk.ranks * (chunk.end - chunk.begin);
  launch("loss_targets", targets_kernel, {blocks_for(rows, kThreads), kThreads}, stream, chunk,
         rows);
}

void row_maxima_cuda(const LossRows& rows, const Stream& stream) {
  launch("loss_maxima", maxima_kernel, a_warp_each(rows), stream, rows);
}

void row_sums_cuda(const LossRows& rows, const Stream& stream) {
  launch("loss_sums", sums_kernel, a_warp_each(rows), stream, rows);
}

void finish_rows_cuda(const LossRows& rows, float z_coef, bool gradient, DType storage,
                      const Stream& stream) {
  nn::with_storage(storage, [&](auto element) {
    launch("loss_gradient", finish_kernel<decltype(element)>, a_warp_each(rows), stream, rows,
           z_coef, gradient);
  });
}

}  // namespace moiety::model
