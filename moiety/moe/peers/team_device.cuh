// The team of a step on a GPU: a block of threads.
#pragma once

#include "moiety/moe/peers/primitives.h"

namespace moiety::moe::peers {

class DeviceWarp {
 public:
  template <class F>
  __device__ void each(int64_t n, F&& f) {
    for (int64_t i = lane(); i < n; i += 32) f(i);
  }
  template <class F>
  __device__ void one(F&& f) {
    if (lane() == 0) f();
  }
  __device__ void sync() { __syncwarp(); }
  template <class F, class Use>
  __device__ void fold(F&& f, Use&& use) {
    float v = f(lane());
#pragma unroll
    for (int o = 16; o >= 1; o /= 2) v += __shfl_down_sync(0xFFFFFFFFu, v, o);
    if (lane() == 0) use(v);
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
};

class DeviceTeam {
 public:
  __device__ explicit DeviceTeam(std::byte* memory, unsigned long long* total)
      : memory_(memory), total_(total) {}
  __device__ int64_t block() const { return blockIdx.x; }
  __device__ int64_t blocks() const { return gridDim.x; }
  template <class F>
  __device__ void each(int64_t n, F&& f) {
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) f(i);
  }
  template <class F>
  __device__ void each_warp(int64_t n, F&& f) {
    DeviceWarp warp;
    for (int64_t i = threadIdx.x / 32; i < n; i += blockDim.x / 32) f(warp, i);
  }
  template <class F>
  __device__ void one(F&& f) {
    if (threadIdx.x == 0) f();
  }
  __device__ void sync() { __syncthreads(); }
  __device__ bool any(bool x) { return __syncthreads_or(x) != 0; }
  template <class F>
  __device__ int64_t sum(int64_t n, F&& f) {
    __syncthreads();
    if (threadIdx.x == 0) *total_ = 0;
    __syncthreads();
    int64_t mine = 0;
    each(n, [&](int64_t i) { mine += f(i); });
    if (mine != 0) atomicAdd(total_, static_cast<unsigned long long>(mine));
    __syncthreads();
    return static_cast<int64_t>(*total_);
  }
  template <class T>
  __device__ T* shared(int64_t offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }

 private:
  std::byte* memory_;
  unsigned long long* total_;
};

}  // namespace moiety::moe::peers
