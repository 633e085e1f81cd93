// Barriers in shared memory (mbarrier), bulk copies that report to them, and the shared memory of
// the thread blocks of a cluster. PTX ISA 8.5 describes every instruction by its name.
#pragma once

#include <cstdint>

namespace moiety::nn::device {

__device__ inline uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}
// The address of the same place in the shared memory of a block of the cluster.
__device__ inline uint32_t cluster_address(const void* p, int block) {
  uint32_t out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(shared_address(p)), "r"(block));
  return out;
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
  // Stores at the place of `own` in the shared memory of a block of the cluster, whose barrier gets
  // the four bytes.
  __device__ void store_at(const float* own, int block, float value) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
            cluster_address(own, block)),
        "r"(__float_as_uint(value)), "r"(cluster_address(&state, block))
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
  // The same where blocks of the cluster store; what they stored is visible then.
  __device__ void wait_for_cluster(int use) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(address()),
        "r"(use & 1)
        : "memory");
  }
};

// Makes the barriers that this thread has initialized known to bulk copies and to the cluster.
__device__ inline void fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// All threads of the cluster meet.
__device__ inline void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ inline int block_of_cluster() {
  uint32_t out;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(out));
  return int(out);
}
// Multiples of 16 bytes, from and to multiples of 16 bytes.
__device__ inline void bulk_copy(void* to, const void* from, uint32_t bytes, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(barrier.address())
      : "memory");
}
// Orders this thread's accesses of shared memory before bulk copies that come after.
__device__ inline void fence_for_bulk() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace moiety::nn::device
