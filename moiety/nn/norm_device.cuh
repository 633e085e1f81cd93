// Parts that the kernels of norm share: a row's sums in the order of lane_sum, by kLanes lanes that
// hold its octets in turns.
#pragma once

#include <array>
#include <cstdint>

#include "moiety/formats/octet.cuh"
#include "moiety/nn/norm.h"

namespace moiety::nn::device {

constexpr uint32_t kWarp = 0xFFFFFFFFu;

// Elements that do not exist are 0 and change no bit: no sum is ever -0.
template <class T>
__device__ float add_products(const Octet<T>& a, const Octet<T>& b, float sum) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) sum = __fmaf_rn(a[i], b[i], sum);
  return sum;
}

// The sum over the lanes, given to all of them. Lanes that a short row does not have would hold +0.
// All lanes of a warp call it.
template <int kLanes>
__device__ float fold(float sum) {
#pragma unroll
  for (int o = kLanes / 2; o >= 1; o /= 2) sum += __shfl_xor_sync(kWarp, sum, o);
  return sum;
}

// kCount sums over the lanes at once, with the additions of `fold`: every step halves the number of
// sums that a lane carries on. Lane l gets sum l / (kLanes / kCount).
template <int kLanes, int kCount>
__device__ float fold_rows(const float (&sums)[kCount]) {
  static_assert(kCount <= kLanes);
  constexpr int kOffset = kLanes / 2, kLeft = kCount > 1 ? kCount / 2 : 1;
  float left[kLeft];
  const bool upper = threadIdx.x & kOffset;
#pragma unroll
  for (int i = 0; i < kLeft; ++i) {
    const float keep = upper ? sums[kCount - kLeft + i] : sums[i];
    const float give = upper ? sums[i] : sums[kCount - kLeft + i];
    left[i] = keep + __shfl_xor_sync(kWarp, give, kOffset);
  }
  if constexpr (kOffset == 1) {
    return left[0];
  } else {
    return fold_rows<kOffset>(left);
  }
}

// The rows of the class that row `first` begins.
__device__ inline int class_rows(int64_t rows, int64_t first, int64_t classes) {
  return first < rows ? int((rows - 1 - first) / classes) + 1 : 0;
}

// Numbers that depend only on a row's length.
struct RowLength {
  // the inverse of a power of two, with which the product is the quotient; else 0
  float n, inverse;
  __device__ float mean(float sum) const { return inverse != 0 ? sum * inverse : sum / n; }
};
inline RowLength row_length(int64_t n) {
  return {static_cast<float>(n), (n & (n - 1)) == 0 ? 1.0f / static_cast<float>(n) : 0.0f};
}

__device__ inline float inverse_rms(float sum, const RowLength& length, float eps) {
  return 1.0f / sqrtf(length.mean(sum) + eps);
}

// The two numbers that a row's elements need, in the backward pass, from the row's sums.
struct RowSums {
  float r, factor;
};

__device__ inline RowSums row_sums(const RowLength& length, float eps, float squares, float dot) {
  const float r = inverse_rms(squares, length, eps);
  return {r, length.mean(r * r * r) * dot};
}

// Adds an octet's part of the sum of u x.
template <class T>
__device__ float add_dot(const Octet<T>& g, const Octet<T>& dy, const Octet<T>& x, float sum) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) sum = __fmaf_rn(g[i] * dy[i], x[i], sum);
  return sum;
}

template <class T>
__device__ Octet<T> dx_octet(const RowSums& s, const Octet<T>& x, const Octet<T>& dy,
                             const Octet<T>& g, bool add, const Octet<T>& addend) {
  float v[kOctet];
#pragma unroll
  for (int i = 0; i < kOctet; ++i) v[i] = s.r * (g[i] * dy[i]) - s.factor * x[i];
  if (add) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = addend[i] + v[i];
  }
  return round_octet<T>(v);
}

// Keeps octets packed until they are used again; without it their elements, and products with them,
// would stay in registers as floats.
template <class T, int kCount>
__device__ void keep_packed(Octet<T> (&x)[kCount], Octet<T> (&dy)[kCount]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
#pragma unroll
    for (int w = 0; w < Octet<T>::kWords; ++w) {
      asm volatile("" : "+r"(x[j].word[w]), "+r"(dy[j].word[w]));
    }
  }
}

// Offsets of the rows of a group of lanes: each lane finds those of one row and gives them to all.
template <int kLanes, int kViews>
struct RowOffsets {
  std::array<int64_t, kViews> mine;
  bool small;
  __device__ int64_t of(int view, int row) const {
    if (small) return __shfl_sync(kWarp, static_cast<int>(mine[view]), row, kLanes);
    return __shfl_sync(kWarp, mine[view], row, kLanes);
  }
};

}  // namespace moiety::nn::device
