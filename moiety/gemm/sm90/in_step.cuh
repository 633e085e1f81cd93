// Blocks that read the same operands at the same time wait for each other between tiles. Those that are
// ahead read from memory what others find in the cache too late. It is a matter of speed alone, so
// nobody waits for long: not where groups differ, nor for blocks that another kernel holds up.
#pragma once

#include "moiety/gemm/sm90/device.cuh"
#include "moiety/gemm/sm90/grouped_sm90.h"

namespace moiety::gemm::sm90 {

constexpr int kMostMultiprocessors = 144;  // that chips of this generation have

// How often blocks have met, by the number of pairs that a launch has of them. A launch adds a multiple
// of its blocks, so that the next one, or one beside it, finds what it can count from.
static __device__ uint64_t blocks_met[kMostMultiprocessors / kPair + 1];

// For one thread of each block, all of which meet equally often.
class BlocksInStep {
 public:
  __device__ void meet() {
    constexpr int64_t kPatience = 4000;  // cycles; a tile of many rows takes 60,000
    uint64_t* met = &blocks_met[gridDim.x / kPair];
    if (all_ == 0) all_ = look(met) / gridDim.x * gridDim.x;  // the others wait for this block
    all_ += gridDim.x;
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], 1;" ::"l"(met) : "memory");
    const int64_t since = clock64();
    while (look(met) < all_ && clock64() - since < kPatience) {
    }
  }

 private:
  __device__ static uint64_t look(const uint64_t* met) {
    uint64_t count;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(count) : "l"(met) : "memory");
    return count;
  }
  uint64_t all_ = 0;  // the count when all have come
};

}  // namespace moiety::gemm::sm90
