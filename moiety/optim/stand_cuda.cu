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

__global__ void skip_on_fault(const uint64_t* const* words, int64_t count, int32_t* skip) {
  for (int64_t i = 0; i < count; ++i) {
    uint64_t word;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(words[i]) : "memory");
    if (word != 0) *skip = 1;
  }
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

void skip_on_fault_cuda(TensorView addresses, int32_t* skip, const Stream& stream) {
  launch("skip_on_fault", skip_on_fault, {.blocks = 1, .threads = 1}, stream,
         static_cast<const uint64_t* const*>(addresses.raw()), addresses.numel(), skip);
}

}  // namespace moiety::optim
