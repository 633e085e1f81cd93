#include <algorithm>

#include "moiety/base/launch.cuh"
#include "moiety/comm/mapped/kernels.h"
#include "moiety/comm/mapped/reduce_device.cuh"

namespace moiety::comm::mapped {
namespace {

struct Sources {
  const std::byte* at[kMaxRanks];
  int count;
};

// N elements, loaded and stored at once.
template <class T, int N>
struct alignas(N * sizeof(T)) Pack {
  T x[N];
};

// Sums packs first, first + step, ...; each thread has several in flight. Plain loads, since peers
// write what is read here.
template <class T, ReduceOp op, int N>
__device__ void sum_packs(T* to, const Sources& sources, int64_t packs, int64_t first,
                          int64_t step) {
  constexpr int kFlight = 4;
  using A = Accumulator<T>;
  using P = Pack<T, N>;
  const auto at = [&](int r) { return reinterpret_cast<const P*>(sources.at[r]); };
  for (int64_t i = first; i < packs; i += kFlight * step) {
    A total[kFlight][N];
    P loaded[kFlight];
    for (int r = 0; r < sources.count; ++r) {
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        if (i + f * step < packs) loaded[f] = at(r)[i + f * step];
      }
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
#pragma unroll
        for (int e = 0; e < N; ++e) {
          const A x = static_cast<A>(loaded[f].x[e]);
          total[f][e] = r == 0 ? x : combine<op>(total[f][e], x);
        }
      }
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

template <class T, ReduceOp op, int N>
__global__ void sum_kernel(T* to, const __grid_constant__ Sources sources, int64_t n) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  sum_packs<T, op, N>(to, sources, n / N, first, step);
  if constexpr (N > 1) {  // the elements behind the last pack
    const int64_t tail = n / N * N + first;
    if (tail >= n) return;
    Sources rest = sources;
    for (int r = 0; r < rest.count; ++r) rest.at[r] += tail * int64_t(sizeof(T));
    sum_packs<T, op, 1>(to + tail, rest, 1, 0, 1);
  }
}

template <class T, ReduceOp op, int N>
void launch_sum(const SumStep& step, const Sources& sources, int blocks, const Stream& stream) {
  constexpr int kThreads = 512, kPacks = 4;
  const int64_t needed = std::max<int64_t>(1, blocks_for(step.elements, kThreads * kPacks * N));
  launch("comm_sum", sum_kernel<T, op, N>,
         {.blocks = blocks > 0 ? std::min<int64_t>(blocks, needed) : needed, .threads = kThreads},
         stream, reinterpret_cast<T*>(step.to), sources, step.elements);
}

template <class T>
constexpr int kWide = 16 / int(sizeof(T));

}  // namespace

void sum(const SumStep& step, DType dtype, ReduceOp op, int blocks, const Stream& stream) {
  Sources sources{.at = {}, .count = static_cast<int>(step.sources.size())};
  uintptr_t bits = reinterpret_cast<uintptr_t>(step.to);
  for (size_t r = 0; r < step.sources.size(); ++r) {
    sources.at[r] = step.sources[r];
    bits |= reinterpret_cast<uintptr_t>(step.sources[r]);
  }
  for_reduction(dtype, op, [&]<class T, ReduceOp o>() {
    if (bits % 16 == 0) {
      launch_sum<T, o, kWide<T>>(step, sources, blocks, stream);
    } else {
      launch_sum<T, o, 1>(step, sources, blocks, stream);
    }
  });
}

void load_sum_kernels() {
  cudaFuncAttributes unused{};
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16,
                            DType::kInt64, DType::kInt32, DType::kUInt8}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
      for_reduction(dtype, op, [&]<class T, ReduceOp o>() {
        MOIETY_CUDA_CHECK(cudaFuncGetAttributes(&unused, sum_kernel<T, o, kWide<T>>));
        MOIETY_CUDA_CHECK(cudaFuncGetAttributes(&unused, sum_kernel<T, o, 1>));
      });
    }
  }
}

}  // namespace moiety::comm::mapped
