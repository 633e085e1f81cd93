// Barriers in shared memory (mbarrier) and bulk copies that report to them. PTX ISA 8.5 describes
// every instruction by its name.
#pragma once

#include <cstdint>

namespace moiety::nn::device {

__device__ inline uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}
// A use of a barrier is complete when all arrivals and all announced bytes have come.
struct Barrier {
  uint64_t state;
  __device__ uint32_t address() { return shared_address(&state); }
  __device__ void init(int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(count) : "memory");
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  __device__ void arrive_expecting(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }
  // Waits until use number `use` of the barrier is complete. A thread that waits is at most one use
  // behind, which the parity can tell apart.
  __device__ void wait(int use) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(address()),
        "r"(use & 1)
        : "memory");
  }
};

// Makes the barriers that this thread has initialized known to bulk copies.
__device__ inline void fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Multiples of 16 bytes, from and to multiples of 16 bytes.
__device__ inline void bulk_copy(void* to, const void* from, uint32_t bytes, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(barrier.address())
      : "memory");
}
// The same to global memory.
__device__ inline void bulk_store(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
// Waits until this thread's bulk stores have read shared memory.
__device__ inline void bulk_stores_read() {
  asm volatile(
      "cp.async.bulk.commit_group;\n"
      "cp.async.bulk.wait_group.read 0;" ::
          : "memory");
}
// Orders this thread's accesses of shared memory before bulk copies that come after.
__device__ inline void fence_for_bulk() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace moiety::nn::device
