// The kernel of rows that are tensors of their own (row_scaled NVFP4).
#pragma once

#include "moiety/quant/quantize/quantize_blocks.cuh"
#include "moiety/quant/quantize/quantize_launch.cuh"

namespace moiety::quant::device {

// The largest value of the threads of each run of `width` warps; `warps` is shared memory of 8
// words. It has two barriers.
__device__ inline uint32_t warps_max(uint32_t v, int width, uint32_t* warps) {
  v = lane_max<31>(v);
  const int mine = threadIdx.x / 32;
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[mine] = v;
  __syncthreads();
  const int first = mine & -width;
  for (int w = first; w < first + width; ++w) v = max(v, warps[w]);
  return v;
}

// A block takes kScaledRows rows, as many at a time as stay in registers; that is at least one row
// of 256 x 16 x kHeld columns, and the rest of a longer row is read twice. Without `cast` it only
// measures the amax.
template <class T, bool kStochastic>
__global__ void __launch_bounds__(kThreads, kResident<T, true>)
    cast_scaled_rows(const __grid_constant__ Source source) {
  const bool cast = source.casts;
  constexpr Format F = Format::kNvfp4;
  constexpr int kHeld = sizeof(T) == 2 ? 4 : 2;
  __shared__ QuantizeJob shared_job;
  __shared__ uint32_t warps[kThreads / 32];
  if (source.skipped()) return;
  cudaGridDependencySynchronize();
  Place place;
  for (int i = 0; find_tile(source, block_tile(source, i), &shared_job, &place); ++i) {
    const QuantizeJob& job = source.kind == Source::Kind::kSingle ? source.job : shared_job;
    int threads = kThreads / kScaledRows;  // threads per row
    while (threads < kThreads && int64_t{threads} * kUnit * kHeld < job.cols) threads *= 2;
    const int64_t end = min(place.row + kScaledRows, job.rows), step = int64_t{threads} * kUnit;
    const auto random = device_random<kStochastic>(job, Direction::kRow);
    // All threads make the same number of rounds, since there are barriers inside.
    for (int64_t base = place.row; base < end; base += kThreads / threads) {
      const int64_t r = base + threadIdx.x / threads;
      const int64_t first = threadIdx.x % threads * kUnit, cols = r < end ? job.cols : 0;
      const T* row = static_cast<const T*>(job.x) + r * job.stride;
      const bool vector = reinterpret_cast<uintptr_t>(row) % 16 == 0;
      const ByteRange all = bytes_of<T>(job);
      const auto load = [&](int64_t c) {
        if (vector && c + kUnit <= cols) return load_unit(row + c);
        RaggedUnit<T> x;
        x.load(row + c, cols - c, all);
        return x.unit();
      };
      Unit<T> held[kHeld];
      uint32_t amax = 0;
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        held[k] = load(first + k * step);
        amax = max(amax, amax_bits(held[k]));
      }
      for (int64_t c = first + kHeld * step; c < cols; c += step) {
        amax = max(amax, amax_bits(load(c)));
      }
      amax = warps_max(amax, threads / 32, warps);
      if (r >= end) continue;
      if (job.amax_given && cast) amax = __float_as_uint(job.amax[0][r]);
      TensorFactors<F> tensor;
      tensor.nvfp4 = nvfp4_tensor_scale(__uint_as_float(amax));
      if (first == 0) {
        job.amax[0][r] = __uint_as_float(amax);
        if (cast) job.tensor_scale[0][r] = tensor.nvfp4.decode;
      }
      if (!cast) continue;
      uint32_t largest = amax;
      RowOutput<F> out(job, r, first, 0, int(step));
      const auto put = [&](const Unit<T>& x, int64_t c) {
        if (c < cols) {
          const uint32_t block = amax_bits(x);
          const auto factor = BlockFactor<F>::of(job, tensor, block);
          out.store(encode_unit<F, E2M1, kStochastic>(
                        x, factor.encode, block, random_bits<kStochastic>(random, out.block())),
                    true);
          out.store_scale(factor);
          largest = max(largest, block);
        }
        out.next();
      };
#pragma unroll
      for (int k = 0; k < kHeld; ++k) put(held[k], first + k * step);
      for (int64_t c = first + kHeld * step; c < cols; c += step) put(load(c), c);
      report_amax<F>(job, largest);
    }
  }
}

}  // namespace moiety::quant::device
