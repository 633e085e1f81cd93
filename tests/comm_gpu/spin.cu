#include "moiety/base/launch.cuh"

namespace moiety::comm {
namespace {

__global__ void spin_kernel(int64_t nanoseconds) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (int64_t(now - start) < nanoseconds);
}

}  // namespace

void spin(const Stream& stream, int64_t nanoseconds) {
  launch("spin", spin_kernel, {.blocks = 1, .threads = 1}, stream, nanoseconds);
}

}  // namespace moiety::comm
