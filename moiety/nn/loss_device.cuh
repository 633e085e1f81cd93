// Parts that the kernels of cross-entropy share: groups of logits, which warps take, and what a row
// stores.
#pragma once

#include <cstdint>

#include "moiety/base/launch.cuh"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp32.h"
#include "moiety/formats/octet.cuh"
#include "moiety/nn/loss.h"

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
// (loss_whole_cuda.cu): of so many logits, with a gradient, all in vectors of 16 bytes.
bool loss_whole_takes(int64_t vocabulary);
void loss_whole_cuda(const LossParams& p, DType dlogits, const Stream& stream);

namespace device {

constexpr int kLossGroup = 256, kLossEach = kLossGroup / 32;  // logits of a warp and of a lane

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

}  // namespace device
}  // namespace moiety::nn
