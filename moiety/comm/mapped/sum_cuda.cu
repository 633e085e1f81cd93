#include <algorithm>

#include "moiety/base/launch.cuh"
#include "moiety/comm/mapped/kernels.h"
#include "moiety/comm/mapped/sum_device.cuh"
#include "moiety/comm/packs.cuh"

namespace moiety::comm::mapped {
namespace {

constexpr int kThreads = 512;

template <class T, ReduceOp op, int N>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(T* to, const __grid_constant__ Sources sources, int64_t n) {
  sum_elements<T, op, N>(to, sources, n);
}

template <class T, ReduceOp op, int N>
void launch_sum(const SumStep& step, const Sources& sources, int blocks, const Stream& stream) {
  constexpr int kPacks = 4;
  const int64_t needed = std::max<int64_t>(1, blocks_for(step.elements, kThreads * kPacks * N));
  launch("comm_sum", sum_kernel<T, op, N>,
         {.blocks = blocks > 0 ? std::min<int64_t>(blocks, needed) : needed, .threads = kThreads},
         stream, reinterpret_cast<T*>(step.to), sources, step.elements);
}

constexpr int64_t kShortCopy = int64_t{16} << 20;
constexpr int kCopyFlight = 4;

__global__ void __launch_bounds__(kThreads) copy_kernel(uint4* to, const uint4* from, int64_t n) {
  carry_packs<kThreads, kCopyFlight>(
      int64_t{blockIdx.x} * kThreads * kCopyFlight + threadIdx.x, n,
      [&](int64_t i) { return from[i]; }, [&](int64_t i, const uint4& x) { to[i] = x; });
}

}  // namespace

bool copies_by_kernel(const CopyStep& copy) {
  const auto bits = reinterpret_cast<uintptr_t>(copy.to) | reinterpret_cast<uintptr_t>(copy.from) |
                    static_cast<uintptr_t>(copy.bytes);
  return copy.rows == 1 && copy.bytes <= kShortCopy && bits % 16 == 0;
}

void copy_by_kernel(const CopyStep& copy, const Stream& stream) {
  const int64_t n = copy.bytes / 16;
  launch("comm_copy", copy_kernel, {blocks_for(n, kThreads * kCopyFlight), kThreads}, stream,
         reinterpret_cast<uint4*>(copy.to), reinterpret_cast<const uint4*>(copy.from), n);
}

bool sums_wide(const SumStep& step) {
  auto bits = reinterpret_cast<uintptr_t>(step.to);
  for (const std::byte* source : step.sources) bits |= reinterpret_cast<uintptr_t>(source);
  return bits % 16 == 0;
}

void sum(const SumStep& step, DType dtype, ReduceOp op, int blocks, const Stream& stream) {
  const Sources sources = sources_of(step);
  for_reduction(dtype, op, [&]<class T, ReduceOp o>() {
    if (sums_wide(step)) {
      launch_sum<T, o, kWide<T>>(step, sources, blocks, stream);
    } else {
      launch_sum<T, o, 1>(step, sources, blocks, stream);
    }
  });
}

void load_sum_kernels() {
  cudaFuncAttributes unused{};
  MOIETY_CUDA_CHECK(cudaFuncGetAttributes(&unused, copy_kernel));
  for_all_reductions([&]<class T, ReduceOp o>() {
    MOIETY_CUDA_CHECK(cudaFuncGetAttributes(&unused, sum_kernel<T, o, kWide<T>>));
    MOIETY_CUDA_CHECK(cudaFuncGetAttributes(&unused, sum_kernel<T, o, 1>));
  });
}

}  // namespace moiety::comm::mapped
