// A block a row, three times over it: the maximum, the sum of exponentials, the gradient. In the
// second pass one warp adds, in the order of lane_sum, what the others compute. The first logits of
// a row stay in shared memory.
#include <algorithm>

#include "moiety/base/launch.cuh"
#include "moiety/base/math.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp32.h"
#include "moiety/model/element.h"
#include "moiety/model/loss.h"

namespace moiety::model {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kGroup = 256, kEach = kGroup / 32;  // logits that a warp takes at a time
constexpr int kProducers = kWarps - 1;            // warps of the second pass that compute
constexpr int64_t kHeld = 20480;                  // logits in shared memory: two blocks fit
constexpr uint32_t kWarp = 0xFFFFFFFFu;

struct Params {
  const float* logits;
  int64_t logits_stride;
  const int32_t* target;
  const uint8_t* mask;  // may be null
  float* loss;
  void* dlogits;  // may be null
  int64_t dlogits_stride;
  int64_t vocabulary;
  float z_coef;
};

int64_t held_of(int64_t vocabulary) {
  return std::min(kHeld, (vocabulary + kGroup - 1) / kGroup * kGroup);
}

// A row of logits, read in groups by warps; what lies past its end is -inf.
struct Row {
  const float* z;
  float* held;  // shared
  int64_t n, held_n;
  int lane = threadIdx.x % 32;

  __device__ void load(int64_t group, float (&v)[kEach]) const {
    const int64_t first = group * kGroup + lane;
    const float* from = first < held_n ? held : z;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t i = first + 32 * j;
      v[j] = i < n ? from[i] : -INFINITY;
    }
  }
};

// Of all threads; `memory` has a place for each warp.
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

__device__ float row_max(const Row& row, float* memory) {
  float max = -INFINITY;
#pragma unroll 2
  for (int64_t group = threadIdx.x / 32; group * kGroup < row.n; group += kWarps) {
    const int64_t first = group * kGroup + row.lane;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t i = first + 32 * j;
      const float v = i < row.n ? row.z[i] : -INFINITY;
      if (i < row.held_n) row.held[i] = v;
      max = fmaxf(max, v);  // which passes over NaN
    }
  }
  return block_max(max, memory);
}

// The sum of exp(z - max), in lane 0 of the first warp. A tile is a group of each producer; one is
// added while the next is computed. exp is never -0, so what lies past the end adds nothing.
__device__ float row_sum(const Row& row, float max, float (&tiles)[2][kProducers][kGroup]) {
  const int warp = threadIdx.x / 32;
  const int64_t groups = (row.n + kGroup - 1) / kGroup;
  const int64_t count = (groups + kProducers - 1) / kProducers;
  float sum = 0, next[kEach];
  if (warp > 0) row.load(warp - 1, next);
  for (int64_t tile = 0; tile <= count; ++tile) {
    if (warp > 0 && tile < count) {
      float v[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) v[j] = next[j];
      row.load((tile + 1) * kProducers + warp - 1, next);
      const int64_t first = (tile * kProducers + warp - 1) * kGroup + row.lane;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const float e = first + 32 * j < row.n ? exp_nonpositive(v[j] - max) : 0.0f;
        tiles[tile % 2][warp - 1][32 * j + row.lane] = e;
      }
    } else if (warp == 0 && tile > 0) {
#pragma unroll 3
      for (const auto& group : tiles[(tile - 1) % 2]) {
        const auto* e = reinterpret_cast<const float4*>(&group[8 * row.lane]);
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

// dlogits may lie in the logits' memory: what is written is behind what all have read.
template <class T>
__device__ void store_gradient(const Row& row, float max, float factor, int64_t target, T* dz) {
  const int64_t groups = (row.n + kGroup - 1) / kGroup;
  float next[kEach];
  row.load(threadIdx.x / 32, next);
  for (int64_t base = 0; base < groups; base += kWarps) {
    const int64_t group = base + threadIdx.x / 32, first = group * kGroup + row.lane;
    float v[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) v[j] = next[j];
    row.load(group + kWarps, next);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t i = first + 32 * j;
      if (i >= row.n) continue;
      const float p = factor * exp_nonpositive(v[j] - max);
      dz[i] = T(i == target ? p - 1 : p);
    }
  }
}

// A row without a target, or with one that cannot be.
template <class T>
__device__ void store_constant(const Params& p, int64_t n, float value) {
  if (threadIdx.x == 0) p.loss[n] = value;
  if (!p.dlogits) return;
  T* dz = static_cast<T*>(p.dlogits) + n * p.dlogits_stride;
  for (int64_t i = threadIdx.x; i < p.vocabulary; i += kThreads) dz[i] = T(value);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) loss_rows(const __grid_constant__ Params p) {
  __shared__ alignas(16) float tiles[2][kProducers][kGroup];
  __shared__ float memory[kWarps], factor;
  extern __shared__ float held[];
  const int64_t n = blockIdx.x, target = p.target[n];
  if (target == kIgnoredTarget || (p.mask && p.mask[n] == 0)) {
    return store_constant<T>(p, n, 0.0f);
  }
  if (target < 0 || target >= p.vocabulary) return store_constant<T>(p, n, kCanonicalNan);
  const float* z = p.logits + n * p.logits_stride;
  const Row row{z, held, p.vocabulary, min(kHeld, p.vocabulary)};
  const float max = row_max(row, memory);
  const float sum = row_sum(row, max, tiles);
  if (threadIdx.x == 0) {
    const float lse = max + log(sum);
    p.loss[n] = lse - z[target];
    factor = (1 + 2 * p.z_coef * lse) * (1 / sum);
  }
  if (!p.dlogits) return;
  __syncthreads();
  store_gradient(row, max, factor, target, static_cast<T*>(p.dlogits) + n * p.dlogits_stride);
}

}  // namespace

void cross_entropy_cuda(const CrossEntropyArgs& a, const Stream& stream) {
  const TensorView& dz = a.dlogits_NV;
  const Params p{
      a.logits_NV.data<float>(),       a.logits_NV.stride(0),  a.target_N.data<int32_t>(),
      a.mask_N.data<uint8_t>(),        a.loss_N.data<float>(), dz.raw(),
      dz.defined() ? dz.stride(0) : 0, a.logits_NV.size(1),    a.z_coef};
  const LaunchShape shape{a.logits_NV.size(0), kThreads, 4 * held_of(p.vocabulary)};
  with_storage(dz.defined() ? dz.dtype() : DType::kFloat32, [&](auto element) {
    launch("cross_entropy", loss_rows<decltype(element)>, shape, stream, p);
  });
}

}  // namespace moiety::model
