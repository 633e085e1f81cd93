// A sum over sources that threads share out, in packs of elements that are loaded at once.
#pragma once

#include <algorithm>
#include <type_traits>

#include "moiety/comm/mapped/plan.h"
#include "moiety/comm/mapped/reduce_device.cuh"

namespace moiety::comm::mapped {

// Elements of 16 bytes.
template <class T>
inline constexpr int kWide = 16 / int(sizeof(T));

template <class T, int N>
struct alignas(N * sizeof(T)) Pack {
  T x[N];
};

// Packs of N elements of a source that a thread loads before it sums the first of them.
template <int N>
inline constexpr int kPacksInFlight = N <= 4 ? 8 : 32 / N;

// Sums packs first, first + step, ... of `count` sources, of which at(r) is a pointer to the first
// element. A thread has several packs of two sources in flight, with more sources of one, as it has
// no registers for more. Plain loads, since peers write what is read here.
template <class T, ReduceOp op, int N, class At, class Index>
__device__ void sum_packs(T* to, At&& at, int count, Index packs, std::type_identity_t<Index> first,
                          std::type_identity_t<Index> step) {
  constexpr int kFlight = kPacksInFlight<N>;
  using A = Accumulator<T>;
  using P = Pack<T, N>;
  for (Index i = first; i < packs; i += kFlight * step) {
    A total[kFlight][N];
    P one[kFlight], other[kFlight];
    const auto load = [&](P(&into)[kFlight], int r) {
      const P* from = reinterpret_cast<const P*>(at(r));
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        if (i + f * step < packs) into[f] = from[i + f * step];
      }
    };
    const auto add = [&](const P(&what)[kFlight], bool opens) {
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
#pragma unroll
        for (int e = 0; e < N; ++e) {
          const A x = static_cast<A>(what[f].x[e]);
          total[f][e] = opens ? x : combine<op>(total[f][e], x);
        }
      }
    };
    load(one, 0);
    if (count > 1) load(other, 1);
    add(one, true);
    for (int r = 1; r < count; ++r) {
      add(other, false);
      if (r + 1 < count) load(other, r + 1);
    }
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      if (i + f * step >= packs) continue;
      P out;
#pragma unroll
      for (int e = 0; e < N; ++e) out.x[e] = static_cast<T>(total[f][e]);
      reinterpret_cast<P*>(to)[i + f * step] = out;
    }
  }
}

// Of a SumStep, for a kernel.
struct Sources {
  const std::byte* at[kMaxRanks];
  int count;
};
inline Sources sources_of(const SumStep& step) {
  Sources out{.at = {}, .count = static_cast<int>(step.sources.size())};
  std::copy(step.sources.begin(), step.sources.end(), out.at);
  return out;
}

// Sums n elements of all sources with all threads of the grid, N in a pack.
template <class T, ReduceOp op, int N>
__device__ void sum_elements(T* to, const Sources& sources, int64_t n) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  const auto at = [&](int r) { return reinterpret_cast<const T*>(sources.at[r]); };
  sum_packs<T, op, N>(to, at, sources.count, n / N, first, step);
  if constexpr (N > 1) {  // the elements behind the last pack
    const int64_t tail = n / N * N + first;
    if (tail < n) {
      sum_packs<T, op, 1>(
          to + tail, [&](int r) { return at(r) + tail; }, sources.count, 1, 0, 1);
    }
  }
}

}  // namespace moiety::comm::mapped
