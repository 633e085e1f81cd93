#include <algorithm>

#include "moiety/base/launch.cuh"
#include "moiety/base/step_ring.h"

namespace moiety::detail {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 64;  // enough to fill the link to the host

__global__ void __launch_bounds__(kThreads) copy_slot(RingCopy c) {
  std::byte* slot = c.ring + static_cast<int64_t>(*c.count % uint64_t(c.slots)) * c.stride;
  const std::byte* from = c.inbound ? slot : c.block;
  std::byte* to = c.inbound ? c.block : slot;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads, words = c.bytes / 16;
  for (int64_t i = first; i < words; i += step) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  for (int64_t i = words * 16 + first; i < c.bytes; i += step) to[i] = from[i];
}

__global__ void advance(uint64_t* count) { ++*count; }

}  // namespace

void copy_ring_cuda(const RingCopy& copy, const Stream& stream) {
  const int64_t blocks = blocks_for(copy.bytes, 16 * kThreads);
  launch("ring", copy_slot, {std::clamp<int64_t>(blocks, 1, kMostBlocks), kThreads}, stream, copy);
  launch("ring", advance, {1, 1}, stream, copy.count);
}

}  // namespace moiety::detail
