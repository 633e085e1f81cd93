// Parts that the kernels of cross-entropy share: groups of logits, which warps take, and what a row
// stores.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moiety/base/launch.cuh"
#include "moiety/base/math.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp32.h"
#include "moiety/formats/octet.cuh"
#include "moiety/nn/loss.h"
#include "moiety/nn/loss_rows.h"
#include "moiety/nn/norm_device.cuh"

namespace moiety::nn {

struct LossParams {
  const float* logits;
  int64_t logits_stride;
  const int32_t* target;
  const uint8_t* mask;  // may be null
  float* loss;
  void* dlogits;  // may be null
  int64_t dlogits_stride;
  int64_t rows, vocabulary;
  int64_t held;  // loss_rows: logits that stay in shared memory, in whole groups
  float z_coef;
};

// Rows that stay on the GPU's multiprocessors from the first pass over them to the last
// (loss_whole_cuda.cu): of so many logits, all in octets (octet.cuh).
bool loss_whole_takes(int64_t vocabulary);
void loss_whole_cuda(const LossParams& p, DType dlogits, const Stream& stream);

namespace device {

constexpr int kLossGroup = 256, kLossEach = kLossGroup / 32;  // logits of a warp and of a lane
static_assert(kLossGroup == nn::kLossGroup);

// The place of a lane's j-th logit in a group: four neighbours at a time with kVector, else one by
// one. Rows of vectors are whole ones at multiples of 16 bytes.
template <bool kVector>
__device__ int loss_place(int j) {
  const int lane = threadIdx.x % 32;
  return kVector ? 128 * (j / 4) + 4 * lane + j % 4 : 32 * j + lane;
}

// A lane's part of a group, of which the first `valid` logits exist; the others are -inf, whose
// exponential is 0. kWhole says that all exist.
template <bool kVector, bool kWhole>
__device__ void take_logits(const float* group, int64_t valid, float (&v)[kLossEach]) {
  if constexpr (kVector) {
#pragma unroll
    for (int j = 0; j < kLossEach; j += 4) {
      const int i = loss_place<kVector>(j);
      float4 four{-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      if (kWhole || i < valid) four = *reinterpret_cast<const float4*>(group + i);
      v[j] = four.x;
      v[j + 1] = four.y;
      v[j + 2] = four.z;
      v[j + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kLossEach; ++j) {
      const int i = loss_place<kVector>(j);
      v[j] = kWhole || i < valid ? group[i] : -INFINITY;
    }
  }
}

// Puts a lane's part of a group into shared memory.
template <bool kVector>
__device__ void put_logits(float* group, const float (&v)[kLossEach]) {
#pragma unroll
  for (int j = 0; j < kLossEach; j += kVector ? 4 : 1) {
    if constexpr (kVector) {
      *reinterpret_cast<float4*>(group + loss_place<kVector>(j)) =
          make_float4(v[j], v[j + 1], v[j + 2], v[j + 3]);
    } else {
      group[loss_place<kVector>(j)] = v[j];
    }
  }
}

// Writes a lane's part of a group of dlogits, of which `valid` exist: the products of the factor and
// the exponentials, less 1 at the target, which may lie outside of the group.
template <bool kVector, class T>
__device__ void store_dlogits(T* group, int64_t valid, int64_t target, float factor,
                              float (&v)[kLossEach]) {
#pragma unroll
  for (float& x : v) x = factor * x;
  if (target >= 0 && target < kLossGroup) {
#pragma unroll
    for (int j = 0; j < kLossEach; ++j) {
      if (loss_place<kVector>(j) == target) v[j] = v[j] - 1;
    }
  }
#pragma unroll
  for (int j = 0; j < kLossEach; j += kVector ? 4 : 1) {
    const int i = loss_place<kVector>(j);
    if (i >= valid) continue;
    if constexpr (!kVector) {
      group[i] = T(v[j]);
    } else if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<uint2*>(group + i) =
          make_uint2(bf16_word(v[j], v[j + 1]), bf16_word(v[j + 2], v[j + 3]));
    } else {
      *reinterpret_cast<float4*>(group + i) = make_float4(v[j], v[j + 1], v[j + 2], v[j + 3]);
    }
  }
}

// Whether a row has a target, and else what it is filled with.
struct LossTarget {
  int32_t word;
  bool given, valid;
  __device__ float constant() const { return given ? kCanonicalNan : 0.0f; }
};
__device__ inline LossTarget loss_target(const LossParams& p, int64_t n) {
  const int32_t word = p.target[n];
  const bool given = word != kIgnoredTarget && !(p.mask && p.mask[n] == 0);
  return {word, given, given && word >= 0 && word < p.vocabulary};
}

// ---- rows over which a block goes several times, of which the first logits stay in shared memory

constexpr int kRowThreads = 512, kRowWarps = kRowThreads / 32;
constexpr int64_t kRowHeld = 20480;  // logits in shared memory: two blocks fit
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// Shared memory of a block before the logits that stay. It has all of a block's shared memory,
// since launch() must know the sum.
struct alignas(16) LossRowMemory {
  float group[kRowWarps][kLossGroup];  // exponentials of a warp
  float sums[2][kLossGroup];           // of groups
  float maxima[kRowWarps];
  float factor;
};

// The logits of a row of `n` that stay, in whole groups.
inline int64_t held_of_row(int64_t n) { return std::min(kRowHeld, n / kLossGroup * kLossGroup); }

// A row of logits, read in groups by warps; past its end it is -inf, whose exponential is 0.
template <bool kVector>
struct LossRow {
  const float* z;
  float* held;  // shared
  int64_t n, held_n;

  __device__ void load(int64_t group, float (&v)[kLossEach]) const {
    if ((group + 1) * kLossGroup <= held_n) {
      return take_logits<kVector, true>(held + group * kLossGroup, kLossGroup, v);
    }
    read(group, v);
  }
  // The same from the row itself.
  __device__ void read(int64_t group, float (&v)[kLossEach]) const {
    const int64_t begin = group * kLossGroup;
    if (begin + kLossGroup <= n) return take_logits<kVector, true>(z + begin, kLossGroup, v);
    take_logits<kVector, false>(z + begin, n - begin, v);
  }
};

// The maximum over the lanes of a warp, given to all of them.
__device__ inline float fold_max(float v) {
#pragma unroll
  for (int o = 16; o >= 1; o /= 2) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, o));
  return v;
}

// The maximum over all threads; `memory` has a place for each warp.
__device__ inline float block_max(float v, float* memory) {
  v = fold_max(v);
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = v;
  __syncthreads();
  v = memory[0];
#pragma unroll
  for (int w = 1; w < kRowWarps; ++w) v = fmaxf(v, memory[w]);
  return v;
}

template <bool kVector>
__device__ float row_max(const LossRow<kVector>& row, float* memory) {
  float max = -INFINITY;
#pragma unroll 2
  for (int64_t group = threadIdx.x / 32; group * kLossGroup < row.n; group += kRowWarps) {
    float v[kLossEach];
    row.read(group, v);
    if ((group + 1) * kLossGroup <= row.held_n) {
      put_logits<kVector>(row.held + group * kLossGroup, v);
    }
#pragma unroll
    for (const float x : v) max = fmaxf(max, x);  // fmaxf passes over NaN
  }
  return block_max(max, memory);
}

// Adds a lane's eight neighbours of 256 floats in shared memory.
__device__ inline float add_neighbours(const float* group, float sum) {
  const auto* from = reinterpret_cast<const float4*>(group) + threadIdx.x % 32 * 2;
  const float4 low = from[0], high = from[1];
  return sum + low.x + low.y + low.z + low.w + high.x + high.y + high.z + high.w;
}

// The loss_sum of exp(z - max), in the first warp. exp is never -0, so places past the end add
// nothing.
template <bool kVector>
__device__ float row_sum(const LossRow<kVector>& row, float max, LossRowMemory& memory) {
  const int warp = threadIdx.x / 32;
  const int64_t groups = (row.n + kLossGroup - 1) / kLossGroup;
  float sum = 0, next[kLossEach];
  row.load(warp, next);
  for (int64_t base = 0; base < groups; base += kLossGroup) {
    float* sums = memory.sums[base / kLossGroup % 2];
    for (int i = warp; i < kLossGroup; i += kRowWarps) {
      float of_group = 0;
      if (base + i < groups) {
        float e[kLossEach];
#pragma unroll
        for (int j = 0; j < kLossEach; ++j) e[j] = next[j];
        row.load(base + i + kRowWarps, next);
#pragma unroll
        for (float& x : e) x = exp_nonpositive(x - max);
        put_logits<kVector>(memory.group[warp], e);
        __syncwarp();
        of_group = fold<32>(add_neighbours(memory.group[warp], 0));
        __syncwarp();
      }
      if (threadIdx.x % 32 == 0) sums[i] = of_group;
    }
    __syncthreads();
    if (warp == 0) sum = add_neighbours(sums, sum);
  }
  return fold<32>(sum);
}

// Writes dlogits, which may lie in the memory of the logits: a write is always behind what all have
// read.
template <class T, bool kVector>
__device__ void store_gradient(const LossRow<kVector>& row, float max, float factor, int64_t target,
                               T* dz) {
  const int64_t groups = (row.n + kLossGroup - 1) / kLossGroup;
  float next[kLossEach];
  row.load(threadIdx.x / 32, next);
  for (int64_t base = 0; base < groups; base += kRowWarps) {
    const int64_t group = base + threadIdx.x / 32;
    float v[kLossEach];
#pragma unroll
    for (int j = 0; j < kLossEach; ++j) v[j] = next[j];
    row.load(group + kRowWarps, next);
    __syncthreads();
#pragma unroll
    for (float& x : v) x = exp_nonpositive(x - max);
    const int64_t begin = group * kLossGroup;
    store_dlogits<kVector>(dz + begin, row.n - begin, target - begin, factor, v);
  }
}

}  // namespace device
}  // namespace moiety::nn
