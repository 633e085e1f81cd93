// What the kernels of norm share: a row's sums in the order of lane_sum by kLanes lanes, which hold
// its octets in turns.
#pragma once

#include <cstdint>

#include "moiety/formats/octet.cuh"

namespace moiety::model::device {

constexpr uint32_t kWarp = 0xFFFFFFFFu;

// Elements that do not exist are 0 and change no bit: no sum is ever -0.
template <class T>
__device__ float add_products(const Octet<T>& a, const Octet<T>& b, float sum) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) sum = __fmaf_rn(a[i], b[i], sum);
  return sum;
}

// The sum over the lanes, in all of them. Lanes that a short row has not would hold +0. All lanes
// of a warp call it.
template <int kLanes>
__device__ float fold(float sum) {
#pragma unroll
  for (int o = kLanes / 2; o >= 1; o /= 2) sum += __shfl_xor_sync(kWarp, sum, o);
  return sum;
}

__device__ inline float inverse_rms(float sum, int64_t n, float eps) {
  return 1.0f / sqrtf(sum / static_cast<float>(n) + eps);
}

}  // namespace moiety::model::device
