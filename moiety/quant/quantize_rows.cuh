// Kernel of rows that are tensors of their own (row_scaled NVFP4).
#pragma once

#include "moiety/quant/quantize_blocks.cuh"

namespace moiety::quant::device {

// Largest of all threads; `warps` is shared memory of 8 words. Two barriers.
__device__ inline uint32_t block_max(uint32_t v, uint32_t* warps) {
  v = lane_max<31>(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) v = max(v, warps[w]);
  return v;
}

// A block a row, which stays in registers up to 256 x 16 x kHeld columns. Without `cast` amax
// alone.
template <class T, bool kStochastic>
__global__ void __launch_bounds__(kThreads)
    cast_scaled_rows(const __grid_constant__ Source source, bool cast) {
  constexpr Format F = Format::kNvfp4;
  constexpr int kHeld = sizeof(T) == 2 ? 4 : 2;
  __shared__ QuantizeJob shared_job;
  __shared__ uint32_t warps[kThreads / 32];
  if (source.skip && *source.skip != 0) return;
  Place place;
  for (int64_t t = blockIdx.x; find_tile(source, t, &shared_job, &place); t += gridDim.x) {
    const QuantizeJob& job = source.kind == Source::Kind::kSingle ? source.job : shared_job;
    const int64_t r = place.row;
    if (r >= job.rows) continue;
    const T* row = static_cast<const T*>(job.x) + r * job.stride;
    const bool vector = reinterpret_cast<uintptr_t>(row) % 16 == 0;
    const auto load = [&](int64_t c) { return load_unit(row + c, job.cols - c, vector); };
    constexpr int64_t kStep = int64_t{kThreads} * kUnit;
    Unit<T> held[kHeld];
    uint32_t amax = 0;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      held[k] = load(threadIdx.x * kUnit + k * kStep);
      amax = max(amax, amax_bits(held[k]));
    }
    for (int64_t c = threadIdx.x * kUnit + kHeld * kStep; c < job.cols; c += kStep) {
      amax = max(amax, amax_bits(load(c)));
    }
    amax = block_max(amax, warps);
    if (job.amax_given && cast) amax = __float_as_uint(job.amax[0][r]);
    TensorFactors<F> tensor;
    tensor.nvfp4 = nvfp4_tensor_scale(__uint_as_float(amax));
    if (threadIdx.x == 0) {
      job.amax[0][r] = __uint_as_float(amax);
      if (cast) job.tensor_scale[0][r] = tensor.nvfp4.decode;
    }
    if (!cast) continue;
    uint32_t largest = amax;
    const auto put = [&](const Unit<T>& x, int64_t c) {
      largest = max(largest, cast_row_unit<F, E2M1, kStochastic>(job, tensor, x, r, c));
    };
#pragma unroll
    for (int k = 0; k < kHeld; ++k) put(held[k], threadIdx.x * kUnit + k * kStep);
    for (int64_t c = kHeld * kStep; c < job.cols; c += kStep) {
      put(load(c + threadIdx.x * kUnit), c + threadIdx.x * kUnit);
    }
    report_amax<F>(job, largest);
  }
}

}  // namespace moiety::quant::device
