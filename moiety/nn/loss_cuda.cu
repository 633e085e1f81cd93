// Cross-entropy on GPUs. Most long rows that have a gradient are read once (loss_whole_cuda.cu). Over
// others a thread block goes three times: for the maximum, the sum of exponentials and the gradient.
// In the second pass one warp adds, in the order of lane_sum, the exponentials that the others
// compute. The first logits of a row stay in shared memory.
#include <algorithm>

#include "moiety/base/math.h"
#include "moiety/nn/element.h"
#include "moiety/nn/loss_device.cuh"

namespace moiety::nn {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kGroup = device::kLossGroup, kEach = device::kLossEach;
constexpr int kProducers = kWarps - 1;  // warps of the second pass that compute
constexpr int64_t kHeld = 20480;        // logits in shared memory: two blocks fit
constexpr uint32_t kWarp = 0xFFFFFFFFu;

using Params = LossParams;

// Shared memory of a block before the logits that stay. It has all of a block's shared memory,
// since launch() must know the sum.
struct alignas(16) Shared {
  float tiles[2][kProducers][kGroup];
  float maxima[kWarps];
  float factor;
};

// A row of logits, read in groups by warps; past its end it is -inf, whose exponential is 0.
template <bool kVector>
struct Row {
  const float* z;
  float* held;  // shared
  int64_t n, held_n;

  __device__ void load(int64_t group, float (&v)[kEach]) const {
    if ((group + 1) * kGroup <= held_n) {
      return device::take_logits<kVector, true>(held + group * kGroup, kGroup, v);
    }
    read(group, v);
  }
  // The same from the row itself.
  __device__ void read(int64_t group, float (&v)[kEach]) const {
    const int64_t begin = group * kGroup;
    if (begin + kGroup <= n) return device::take_logits<kVector, true>(z + begin, kGroup, v);
    device::take_logits<kVector, false>(z + begin, n - begin, v);
  }
};

// The maximum over all threads; `memory` has a place for each warp.
__device__ float block_max(float v, float* memory) {
#pragma unroll
  for (int o = 16; o >= 1; o /= 2) v = fmaxf(v, __shfl_xor_sync(kWarp, v, o));
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = v;
  __syncthreads();
  v = memory[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) v = fmaxf(v, memory[w]);
  return v;
}

template <bool kVector>
__device__ float row_max(const Row<kVector>& row, float* memory) {
  float max = -INFINITY;
#pragma unroll 2
  for (int64_t group = threadIdx.x / 32; group * kGroup < row.n; group += kWarps) {
    float v[kEach];
    row.read(group, v);
    if ((group + 1) * kGroup <= row.held_n) {
      device::put_logits<kVector>(row.held + group * kGroup, v);
    }
#pragma unroll
    for (const float x : v) max = fmaxf(max, x);  // fmaxf passes over NaN
  }
  return block_max(max, memory);
}

// The sum of exp(z - max), in lane 0 of the first warp. A tile holds a group from each producer;
// one tile is added while the next is computed. exp is never -0, so places past the end add
// nothing.
template <bool kVector>
__device__ float row_sum(const Row<kVector>& row, float max,
                         float (&tiles)[2][kProducers][kGroup]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t groups = (row.n + kGroup - 1) / kGroup;
  const int64_t count = (groups + kProducers - 1) / kProducers;
  float sum = 0, next[kEach];
  if (warp > 0) row.load(warp - 1, next);
  for (int64_t tile = 0; tile <= count; ++tile) {
    if (warp > 0 && tile < count) {
      float e[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) e[j] = next[j];
      row.load((tile + 1) * kProducers + warp - 1, next);
#pragma unroll
      for (float& x : e) x = exp_nonpositive(x - max);
      device::put_logits<kVector>(tiles[tile % 2][warp - 1], e);
    } else if (warp == 0 && tile > 0) {
#pragma unroll
      for (const auto& group : tiles[(tile - 1) % 2]) {
        const auto* e = reinterpret_cast<const float4*>(&group[8 * lane]);
        const float4 low = e[0], high = e[1];
        sum += low.x;
        sum += low.y;
        sum += low.z;
        sum += low.w;
        sum += high.x;
        sum += high.y;
        sum += high.z;
        sum += high.w;
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int o = 16; o >= 1; o /= 2) sum += __shfl_xor_sync(kWarp, sum, o);
  return sum;
}

// Writes dlogits, which may lie in the memory of the logits: a write is always behind what all have
// read.
template <class T, bool kVector>
__device__ void store_gradient(const Row<kVector>& row, float max, float factor, int64_t target,
                               T* dz) {
  const int64_t groups = (row.n + kGroup - 1) / kGroup;
  float next[kEach];
  row.load(threadIdx.x / 32, next);
  for (int64_t base = 0; base < groups; base += kWarps) {
    const int64_t group = base + threadIdx.x / 32;
    float v[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) v[j] = next[j];
    row.load(group + kWarps, next);
    __syncthreads();
#pragma unroll
    for (float& x : v) x = exp_nonpositive(x - max);
    const int64_t begin = group * kGroup;
    device::store_dlogits<kVector>(dz + begin, row.n - begin, target - begin, factor, v);
  }
}

// Fills a row that has no target, or an invalid one.
template <class T>
__device__ void store_constant(const Params& p, int64_t n, float value) {
  if (threadIdx.x == 0) p.loss[n] = value;
  if (!p.dlogits) return;
  T* dz = static_cast<T*>(p.dlogits) + n * p.dlogits_stride;
  for (int64_t i = threadIdx.x; i < p.vocabulary; i += kThreads) dz[i] = T(value);
}

template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads, 2) loss_rows(const __grid_constant__ Params p) {
  extern __shared__ float4 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  float* held = reinterpret_cast<float*>(memory + sizeof(Shared) / sizeof(float4));
  const int64_t n = blockIdx.x;
  const device::LossTarget target = device::loss_target(p, n);
  if (!target.valid) return store_constant<T>(p, n, target.constant());
  const float* z = p.logits + n * p.logits_stride;
  const Row<kVector> row{z, held, p.vocabulary, p.held};
  const float max = row_max(row, shared.maxima);
  const float sum = row_sum(row, max, shared.tiles);
  if (threadIdx.x == 0) {
    const float lse = max + log(sum);
    p.loss[n] = lse - z[target.word];
    shared.factor = (1 + 2 * p.z_coef * lse) * (1 / sum);
  }
  if (!p.dlogits) return;
  __syncthreads();
  store_gradient(row, max, shared.factor, target.word,
                 static_cast<T*>(p.dlogits) + n * p.dlogits_stride);
}

}  // namespace

void cross_entropy_cuda(const CrossEntropyArgs& a, const Stream& stream) {
  const TensorView& dz = a.dlogits_NV;
  const int64_t vocabulary = a.logits_NV.size(1);
  const Params p{a.logits_NV.data<float>(),
                 a.logits_NV.stride(0),
                 a.target_N.data<int32_t>(),
                 a.mask_N.data<uint8_t>(),
                 a.loss_N.data<float>(),
                 dz.raw(),
                 dz.defined() ? dz.stride(0) : 0,
                 a.logits_NV.size(0),
                 vocabulary,
                 std::min(kHeld, vocabulary / kGroup * kGroup),
                 a.z_coef};
  const auto fours = [](const TensorView& x) {
    return x.size(1) % 4 == 0 && x.stride(0) % 4 == 0 &&
           reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
  };
  const bool vector = fours(a.logits_NV) && (!dz.defined() || fours(dz));
  const DType dtype = dz.defined() ? dz.dtype() : DType::kFloat32;
  if (dz.defined() && vector && vocabulary > kHeld && loss_whole_takes(vocabulary)) {
    return loss_whole_cuda(p, dtype, stream);
  }
  const LaunchShape shape{p.rows, kThreads, int64_t{sizeof(Shared)} + 4 * p.held};
  with_storage(dtype, [&](auto element) {
    using T = decltype(element);
    launch("cross_entropy", vector ? loss_rows<T, true> : loss_rows<T, false>, shape, stream, p);
  });
}

}  // namespace moiety::nn
