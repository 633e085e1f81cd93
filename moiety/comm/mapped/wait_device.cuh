// Words that cross ranks, and waits for them, on a GPU: the twins of comm/flags.h and comm/wait.h.
#pragma once

#include <cstdint>

#include "moiety/comm/mapped/kernels.h"

namespace moiety::comm::mapped {

// Makes everything before it in this thread, and what the block's barriers have brought to this
// thread, visible to who loads the value with acquire.
__device__ inline void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ inline uint64_t load_acquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ inline uint64_t load_relaxed(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ inline uint64_t nanoseconds() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__device__ inline std::byte* memory_of(const Region& region, int rank) {
  return region.base + rank * region.stride;
}
template <class T>
__device__ T* part_of(const Region& region, int rank, int64_t offset) {
  return reinterpret_cast<T*>(memory_of(region, rank) + offset);
}
__device__ inline uint64_t* poison_of(const Region& region, int rank) {
  return part_of<uint64_t>(region, rank, region.places.poison);
}

__device__ inline PairCall call_with(const Meeting& meeting, int peer) {
  PairCall call = meeting.call;
  call.up = meeting.up[peer];
  call.down = meeting.down[peer];
  return call;
}

// Tells the host of a fault, if it is this rank's first.
__device__ inline void tell_host(const Region& region, const Fault& fault) {
  if (atomicExch(&region.control->fault_taken, 1u) != 0) return;
  region.page->fault = fault;
  store_release(&region.page->found, 1);
}

// Ends the waits of all ranks, for this reason.
__device__ inline void poison_all(const Region& region, const Fault& fault) {
  tell_host(region, fault);
  for (int r = 0; r < region.ranks; ++r) {
    part_of<Fault>(region, r, region.places.faults)[region.rank] = fault;
    store_release(poison_of(region, r), uint64_t(region.rank) + 1);
  }
}

// Whether a rank has found a fault; then the host hears of it, and nothing waits any more.
__device__ inline bool poisoned(const Region& region) {
  const uint64_t origin = load_acquire(poison_of(region, region.rank));
  if (origin == 0) return false;
  tell_host(region, part_of<Fault>(region, region.rank, region.places.faults)[origin - 1]);
  return true;
}

// Leaves the word of meeting `count` at the peer. The call stays in this rank's memory, from where
// the peer reads it if it made another one: a word that followed a call to the peer would wait until
// the call has arrived, as long as it then takes itself.
__device__ inline void post(const Region& region, const PairCall& call, int peer, uint64_t count) {
  part_of<Post>(region, region.rank, post_at(region.places, peer, count))->call = call;
  store_release(part_of<uint64_t>(region, peer, post_at(region.places, region.rank, count)),
                make_word(count, signature(call)));
}

// Waits, since `start`, until the peer has left its word for meeting `count`, of this operation.
// False if it never will.
__device__ inline bool wait_for(const Region& region, const PairCall& call, int peer,
                                uint64_t count, uint64_t operation, uint64_t start) {
  constexpr uint32_t kFirstLook = 8;  // polls; most waits end before
  const uint64_t* at = part_of<uint64_t>(region, region.rank, post_at(region.places, peer, count));
  uint64_t looked = start, word = 0;
  Fault fault{.kind = FaultKind::kNone,
              .rank = region.rank,
              .peer = peer,
              .operation = operation,
              .count = count,
              .mine = call};
  for (uint32_t polls = 1;; ++polls) {
    word = load_acquire(at);
    if (count_of(word) == count) break;
    if (polls % 256 != kFirstLook) continue;
    if (poisoned(region)) return false;
    const uint64_t now = nanoseconds();
    if (now - start > region.deadline_ns) {
      fault.kind = FaultKind::kLate;
    } else if (now - looked > 100000) {
      looked = now;
      if (load_relaxed(&region.page->abort) != 0) fault.kind = FaultKind::kAborted;
    }
    if (fault.kind != FaultKind::kNone) break;
  }
  if (fault.kind == FaultKind::kNone) {
    // A peer that goes on behind its own fault has poisoned this rank before it stored the word.
    if (poisoned(region)) return false;
    if (signature_of(word) == signature(call)) return true;
    fault.kind = FaultKind::kMismatch;
    fault.theirs = part_of<Post>(region, peer, post_at(region.places, region.rank, count))->call;
  }
  if (fault.kind == FaultKind::kLate) {  // the peer's last word is in the other place
    word = load_acquire(
        part_of<uint64_t>(region, region.rank, post_at(region.places, peer, count + 1)));
  }
  fault.word = word;
  fault.nanoseconds = nanoseconds() - start;
  poison_all(region, fault);
  return false;
}

}  // namespace moiety::comm::mapped
