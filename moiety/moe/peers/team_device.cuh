// The team of a step on a GPU: a block of threads.
#pragma once

#include "moiety/moe/peers/primitives.h"

namespace moiety::moe::peers {

inline constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// The slots of a row; lane k has that of choice k.
class DeviceLive {
 public:
  __device__ explicit DeviceLive(int32_t slot)
      : slot_(slot), mask_(__ballot_sync(kAllLanes, slot >= 0)) {}
  __device__ int count() const { return __popc(mask_); }
  __device__ int32_t first() const {
    return __shfl_sync(kAllLanes, slot_, (__ffs(static_cast<int>(mask_)) - 1) & 31);
  }
  template <class F>
  __device__ void each(F&& f) const {
    for (uint32_t left = mask_; left != 0; left &= left - 1) {
      const int k = __ffs(static_cast<int>(left)) - 1;
      f(k, __shfl_sync(kAllLanes, slot_, k));
    }
  }
  template <int most, class F>
  __device__ void batches(F&& f) const {
    bool first = true;
    for (uint32_t left = mask_; left != 0; first = false) {
      int32_t slot[most];
      const int n = min(__popc(left), most);
#pragma unroll
      for (int i = 0; i < most; ++i) {
        const int k = left == 0 ? 0 : __ffs(static_cast<int>(left)) - 1;
        slot[i] = __shfl_sync(kAllLanes, slot_, k);
        left &= left - 1;
      }
      f(first, n, [&](int i) { return slot[i]; });
    }
  }

 private:
  int32_t slot_;
  uint32_t mask_;
};

class DeviceWarp {
 public:
  template <class F>
  __device__ void each(int64_t n, F&& f) {
    for (int64_t i = lane(); i < n; i += 32) f(i);
  }
  template <class F>
  __device__ void lanes(F&& f) {
    f(lane());
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
    for (int o = 16; o >= 1; o /= 2) v += __shfl_down_sync(kAllLanes, v, o);
    if (lane() == 0) use(v);
  }
  template <class F>
  __device__ uint64_t bits(int n, F&& f) {
    const uint64_t mine = lane() < n ? f(lane()) : 0;
    const uint64_t low = __reduce_or_sync(kAllLanes, static_cast<uint32_t>(mine));
    return low | uint64_t{__reduce_or_sync(kAllLanes, static_cast<uint32_t>(mine >> 32))} << 32;
  }
  template <class Has, class Use>
  __device__ int64_t number(int64_t n, Has&& has, Use&& use) {
    int64_t before = 0;
    for (int64_t first = 0; first < n; first += 32) {
      const int64_t i = first + lane();
      const bool it = i < n && has(i);
      const uint32_t all = __ballot_sync(kAllLanes, it);
      if (it) use(i, before + __popc(all & below()));
      before += __popc(all);
    }
    return before;
  }
  template <class Has, class F>
  __device__ void find(int64_t n, Has&& has, F&& f) {
    for (int64_t first = 0; first < n; first += 32) {
      const int64_t i = first + lane();
      for (uint32_t left = __ballot_sync(kAllLanes, i < n && has(i)); left != 0; left &= left - 1) {
        f(first + __ffs(static_cast<int>(left)) - 1);
      }
    }
  }
  template <class F, class Use>
  __device__ int32_t prefix(int64_t n, F&& f, Use&& use) {
    int32_t before = 0;
    for (int64_t first = 0; first < n; first += 32) {
      const int64_t i = first + lane();
      const int32_t sum = before + scanned(i < n ? f(i) : 0);
      if (i < n) use(i, sum);
      before = __shfl_sync(kAllLanes, sum, 31);
    }
    return before;
  }
  template <class F>
  __device__ int32_t sum(int64_t n, F&& f) {
    int32_t mine = 0;
    for (int64_t i = lane(); i < n; i += 32) mine += f(i);
    return __reduce_add_sync(kAllLanes, mine);
  }
  template <class Key, class Take, class Add>
  __device__ void same(int64_t begin, int64_t end, Key&& key, Take&& take, Add&& add) {
    for (int64_t first = begin; first < end; first += 32) {
      const int64_t i = first + lane();
      const int k = i < end ? key(i) : -1;
      const uint32_t alike = __match_any_sync(kAllLanes, k);
      if (k >= 0) take(i, k, __popc(alike & below()));
      __syncwarp();
      if (k >= 0 && (alike & below()) == 0) add(k, __popc(alike));
      __syncwarp();
    }
  }
  template <class Slot>
  __device__ DeviceLive live(int n, Slot&& slot) {
    return DeviceLive(lane() < n ? slot(lane()) : -1);
  }
  // The sum of v over the lanes up to this one.
  template <class V>
  __device__ static V scanned(V v) {
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const V other = __shfl_up_sync(kAllLanes, v, o);
      if (lane() >= o) v += other;
    }
    return v;
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static uint32_t below() { return (1u << lane()) - 1; }
};

class DeviceTeam {
 public:
  // `parts` has room for 32 sums.
  __device__ DeviceTeam(std::byte* memory, int64_t* parts) : memory_(memory), parts_(parts) {}
  __device__ int64_t block() const { return block_; }
  __device__ int64_t blocks() const { return blocks_; }
  __device__ DeviceTeam part(int64_t first, int64_t count) const {
    DeviceTeam out = *this;
    out.block_ -= first;
    out.blocks_ = count;
    return out;
  }
  __device__ int64_t warps() const { return blockDim.x / 32; }
  template <class F>
  __device__ void each(int64_t n, F&& f) {
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) f(i);
  }
  template <class F>
  __device__ void each_warp(int64_t n, F&& f) {
    DeviceWarp warp;
    for (int64_t i = threadIdx.x / 32; i < n; i += warps()) f(warp, i);
  }
  template <class F>
  __device__ void grid_warps(int64_t n, F&& f, int64_t before = 0) {
    DeviceWarp warp;
    const int64_t step = blocks() * warps();
    int64_t first = block() * warps() + threadIdx.x / 32;
    first -= static_cast<uint32_t>(before) % static_cast<uint32_t>(step);
    for (int64_t i = first < 0 ? first + step : first; i < n; i += step) f(warp, i);
  }
  template <class F>
  __device__ void one(F&& f) {
    if (threadIdx.x == 0) f();
  }
  __device__ void sync() { __syncthreads(); }
  __device__ bool any(bool x) { return __syncthreads_or(x) != 0; }
  template <class F>
  __device__ int64_t sum(int64_t n, F&& f) {
    int64_t mine = 0;
    each(n, [&](int64_t i) { mine += f(i); });
    return total(mine);
  }
  __device__ int64_t total(int64_t x) {
    int64_t all = 0;
    before(x, all);
    return all;
  }
  template <class F, class Use>
  __device__ void scan(int64_t n, F&& f, Use&& use) {
    int64_t done = 0;
    for (int64_t first = 0; first < n; first += blockDim.x) {
      const int64_t i = first + threadIdx.x;
      int64_t all = 0;
      const int64_t sum = done + before(i < n ? f(i) : 0, all);
      if (i < n) use(i, sum);
      done += all;
    }
  }
  template <class T>
  __device__ T* shared(int64_t offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }

 private:
  // The sum of v over the threads before this one, and over all.
  __device__ int64_t before(int64_t v, int64_t& all) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int64_t sum = DeviceWarp::scanned(v);
    __syncthreads();  // some may still read the parts of the call before
    if (lane == 31) parts_[warp] = sum;
    __syncthreads();
    const int64_t parts = DeviceWarp::scanned(lane < warps() ? parts_[lane] : 0);
    all = __shfl_sync(kAllLanes, parts, 31);
    const int64_t earlier = __shfl_sync(kAllLanes, parts, warp == 0 ? 0 : warp - 1);
    return (warp == 0 ? 0 : earlier) + sum - v;
  }

  std::byte* memory_;
  int64_t* parts_;
  int64_t block_ = blockIdx.x, blocks_ = gridDim.x;
};

}  // namespace moiety::moe::peers
