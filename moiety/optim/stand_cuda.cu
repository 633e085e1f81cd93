#include "moiety/base/launch.cuh"
#include "moiety/optim/stand.h"

namespace moiety::optim {
namespace {

__device__ uint64_t nanoseconds() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void begin_stand(uint64_t* clock) { clock[0] = nanoseconds(); }
__global__ void end_stand(uint64_t* clock) { clock[1] += nanoseconds() - clock[0]; }
__global__ void take_stands(uint64_t* clock, double* to) {
  *to = double(clock[1]);
  clock[1] = 0;
}

}  // namespace

void begin_stand_cuda(TensorView clock, const Stream& stream) {
  launch("begin_stand", begin_stand, {.blocks = 1, .threads = 1}, stream, clock.data<uint64_t>());
}

void end_stand_cuda(TensorView clock, const Stream& stream) {
  launch("end_stand", end_stand, {.blocks = 1, .threads = 1}, stream, clock.data<uint64_t>());
}

void take_stands_cuda(TensorView clock, double* to, const Stream& stream) {
  launch("take_stands", take_stands, {.blocks = 1, .threads = 1}, stream, clock.data<uint64_t>(),
         to);
}

}  // namespace moiety::optim
