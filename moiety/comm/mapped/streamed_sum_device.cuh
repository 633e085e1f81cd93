// A sum by few blocks over long operands, of which peers have all but one. A thread brings its packs
// to shared memory by asynchronous copies, far ahead of the one that it sums, so that what is on its
// way never waits for a sum.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moiety/comm/mapped/sum_device.cuh"

namespace moiety::comm::mapped {

// Where a sum is stored.
struct Targets {
  std::byte* at[kMaxRanks];
  int count;
};
inline Targets targets_of(const SumStep& step) {
  Targets out{.at = {step.to}, .count = 1 + static_cast<int>(step.also.size())};
  std::copy(step.also.begin(), step.also.end(), out.at + 1);
  return out;
}

// Packs that a thread has on their way. Nobody else touches a thread's places for them, so nothing
// but the thread itself waits.
inline constexpr int kPacksAhead = 16;
template <int kThreads>
inline constexpr int64_t kStreamBytes = int64_t{kPacksAhead} * kThreads * 16;

__device__ inline void copy_async(void* shared, const void* from) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))),
      "l"(from)
      : "memory");
}
__device__ inline void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kOthers>
__device__ void await_group() {  // all groups but the last kOthers
  asm volatile("cp.async.wait_group %0;" ::"n"(kOthers) : "memory");
}

// Sums n elements of all sources with all threads of the grid, blocks of kThreads with kStreamBytes
// of dynamic shared memory. Operands lie at multiples of 16 bytes.
template <class T, ReduceOp op, int kThreads>
__device__ void sum_streamed(const Targets& to, const Sources& sources, int64_t n) {
  extern __shared__ uint4 places[];  // [kPacksAhead][kThreads]
  constexpr int N = kWide<T>;
  using A = Accumulator<T>;
  using P = Pack<T, N>;
  const int64_t packs = n / N, first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  // The pack that is brought next, and the places of packs, in the order in which they are summed.
  int64_t next = first;
  int source = 0, put = threadIdx.x, take = threadIdx.x;
  const auto after = [](int& place) {
    place += kThreads;
    if (place >= kPacksAhead * kThreads) place -= kPacksAhead * kThreads;
  };
  const auto bring = [&] {
    if (next < packs) copy_async(&places[put], sources.at[source] + next * 16);
    close_group();
    after(put);
    if (++source == sources.count) source = 0, next += step;
  };
  for (int k = 0; k < kPacksAhead; ++k) bring();
  for (int64_t i = first; i < packs; i += step) {
    A total[N];
    for (int r = 0; r < sources.count; ++r) {
      await_group<kPacksAhead - 1>();
      const P x = reinterpret_cast<const P&>(places[take]);
      after(take);
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const A v = static_cast<A>(x.x[e]);
        total[e] = r == 0 ? v : combine<op>(total[e], v);
      }
      bring();
    }
    P out;
#pragma unroll
    for (int e = 0; e < N; ++e) out.x[e] = static_cast<T>(total[e]);
    for (int t = 0; t < to.count; ++t) reinterpret_cast<P*>(to.at[t])[i] = out;
  }
  const int64_t tail = packs * N + first;
  if (tail >= n) return;
  T last;
  sum_packs<T, op, 1>(
      &last, [&](int r) { return reinterpret_cast<const T*>(sources.at[r]) + tail; }, sources.count,
      1, 0, 1);
  for (int t = 0; t < to.count; ++t) reinterpret_cast<T*>(to.at[t])[tail] = last;
}

}  // namespace moiety::comm::mapped
