#include <algorithm>

#include "moiety/base/launch.cuh"
#include "moiety/optim/checksum.h"

namespace moiety::optim {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1024;

// The finalizer of SplitMix64.
__device__ uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

__global__ void __launch_bounds__(kThreads)
    add_checksum(const uint64_t* words, int64_t n, unsigned long long* sum) {
  uint64_t own = 0;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += step) {
    own += mix(mix(uint64_t(i) + 0x9E3779B97F4A7C15ull) + words[i]);
  }
#pragma unroll
  for (int o = 16; o >= 1; o /= 2) own += __shfl_xor_sync(0xFFFFFFFFu, own, o);
  if (threadIdx.x % 32 == 0) atomicAdd(sum, static_cast<unsigned long long>(own));
}

}  // namespace

void add_checksum_cuda(TensorView x, uint64_t* sum, const Stream& stream) {
  const int64_t n = x.bytes() / 8;
  launch("add_checksum", add_checksum, {std::min(blocks_for(n, kThreads), kMostBlocks), kThreads},
         stream, static_cast<const uint64_t*>(x.raw()), n,
         reinterpret_cast<unsigned long long*>(sum));
}

}  // namespace moiety::optim
