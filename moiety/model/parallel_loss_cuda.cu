// A thread block has a row, as in nn/loss_cuda.cu, whose pieces these kernels are made of. Logits are
// read twice for a row's maximum and sum, mostly from the GPU's caches the second time, and once more
// for the gradient.
#include "moiety/base/launch.cuh"
#include "moiety/model/parallel_loss_rows.h"
#include "moiety/nn/element.h"
#include "moiety/nn/loss_device.cuh"

namespace moiety::model {
namespace {

constexpr int kThreads = 256, kRowThreads = nn::device::kRowThreads;

__global__ void __launch_bounds__(kThreads) targets_kernel(const TargetChunk c, int64_t rows) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n < rows) c.out[n] = c.at(c.token(n));
}

template <bool kVector>
__device__ nn::device::LossRow<kVector> row_of(const LossRows& c, float* held, int64_t held_n) {
  return {c.logits + int64_t{blockIdx.x} * c.columns, held, c.columns, held_n};
}

template <bool kVector>
__global__ void __launch_bounds__(kRowThreads, 2) words_kernel(const LossRows c, int64_t held_n) {
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<nn::device::LossRowMemory*>(memory);
  auto* held = reinterpret_cast<float*>(memory + sizeof(shared) / sizeof(float4));
  const int64_t n = blockIdx.x;
  const auto row = row_of<kVector>(c, held, held_n);
  const float max = nn::device::row_max(row, shared.maxima);
  const float sum = nn::device::row_sum(row, max, shared);
  if (threadIdx.x > 0) return;
  const int64_t y = c.target[n] == nn::kIgnoredTarget ? -1 : c.target[n] - c.first;
  c.own[kRowMax * c.rows + n] = max;
  c.own[kRowSum * c.rows + n] = sum;
  c.own[kRowTarget * c.rows + n] = y >= 0 && y < c.columns ? row.z[y] : 0.0f;
}

template <class T, bool kVector>
__global__ void __launch_bounds__(kRowThreads, 2)
    finish_kernel(const LossRows c, float z_coef, bool gradient) {
  const int64_t n = blockIdx.x;
  const int32_t target = c.target[n];
  const bool counts = target != nn::kIgnoredTarget;
  T* dz = reinterpret_cast<T*>(c.logits + n * c.columns);
  if (!counts || target < 0 || target >= c.tokens_of) {
    const float value = counts ? kCanonicalNan : 0.0f;
    if (threadIdx.x == 0) c.loss[n] = value;
    if (!gradient) return;
    for (int64_t v = threadIdx.x; v < c.columns; v += kRowThreads) dz[v] = T(value);
    return;
  }
  const RowTotal total = total_of(c, n);
  const float lse = total.max + log(total.sum);
  if (threadIdx.x == 0) c.loss[n] = lse - total.target;
  if (!gradient) return;
  nn::device::store_gradient(row_of<kVector>(c, nullptr, 0), c.own[n],
                             gradient_factor(c, n, total, lse, z_coef), target - c.first, dz);
}

// Whether rows of logits, and of gradients in their place, are vectors of 16 bytes.
bool in_vectors(const LossRows& c) {
  return c.columns % 4 == 0 && reinterpret_cast<uintptr_t>(c.logits) % 16 == 0;
}

}  // namespace

void pick_targets_cuda(const TargetChunk& chunk, const Stream& stream) {
  const int64_t rows = chunk.ranks * (chunk.end - chunk.begin);
  launch("loss_targets", targets_kernel, {blocks_for(rows, kThreads), kThreads}, stream, chunk,
         rows);
}

void row_words_cuda(const LossRows& rows, const Stream& stream) {
  const int64_t held = nn::device::held_of_row(rows.columns);
  const LaunchShape shape{rows.rows, kRowThreads,
                          int64_t{sizeof(nn::device::LossRowMemory)} + 4 * held};
  launch("loss_words", in_vectors(rows) ? words_kernel<true> : words_kernel<false>, shape, stream,
         rows, held);
}

void finish_rows_cuda(const LossRows& rows, float z_coef, bool gradient, DType storage,
                      const Stream& stream) {
  nn::with_storage(storage, [&](auto element) {
    using T = decltype(element);
    launch("loss_gradient", in_vectors(rows) ? finish_kernel<T, true> : finish_kernel<T, false>,
           {rows.rows, kRowThreads}, stream, rows, z_coef, gradient);
  });
}

}  // namespace moiety::model
