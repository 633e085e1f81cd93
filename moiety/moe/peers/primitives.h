// What the steps of an operation among GPU ranks are written in. A step is a function object whose
// body runs once for each thread of a grid; it knows its place from the team that it is given: that
// of a GPU's block of threads (team_device.cuh), or one of threads of the host, which tests run it
// with (tests/moe/host_team.h). So what a GPU does is tested, bit for bit, where there is none.
//
// A team has
//   block(), blocks()    its number in the grid, and how many there are
//   part(first, count)   the same team, in a grid of blocks [first, first + count) of this one
//   warps()              the number of its warps
//   each(n, f)           f(i) for i < n, spread over the threads
//   each_warp(n, f)      f(warp, i) for i < n, spread over the warps
//   grid_warps(n, f, before)   the same, spread over the warps of all teams of the grid, as if they
//                        had had so many before
//   one(f)               f() on one thread
//   sync()               a barrier of the team, which brings stores before it to all of its threads
//   any(x)               a barrier; whether x is true on any thread
//   sum(n, f)            the sum of f(i) over i < n, int64, on every thread; all call it
//   total(x)             the sum of x over the threads, int64, on every thread; all call it
//   scan(n, f, use)      use(i, the sum of f(i') over i' < i), int64, on one thread for each i; all
//                        call it
//   shared<T>(offset)    its memory of its own, which holds what the step asked for
// and a warp, whose lanes all call what follows with the same arguments,
//   each(n, f)           f(i) for i < n, spread over its lanes
//   lanes(f)             f(lane) for its 32 lanes
//   one(f)               f() on one lane
//   sync()               a barrier of the lanes
//   fold(f, use)         use(the sum of f(lane) over 32 lanes in lane_sum's order, base/math.h)
//   bits(n, f)           the bits, 64, of all f(i) for i < n <= 32
//   number(n, has, use)  use(i, number of i' < i with has(i')) for every i < n with has(i), on one
//                        lane; the number of all of them
//   find(n, has, f)      f(i) on all lanes for every i < n with has(i), in order
//   prefix(n, f, use)    use(i, sum of f(i') over i' <= i), int32, on one lane for each i < n; the
//                        whole sum
//   sum(n, f)            the sum of f(i) over i < n, int32, on all lanes
//   same(begin, end, key, take, add)   for i from begin to end, in order, with key(i) >= 0:
//                        take(i, key, number) on one lane, where `number` counts i' before i of the
//                        same key since add(key, count) was called for it, on one lane
//   live(n, slot)        slot(k) for k < n <= 32, of which those >= 0 count
// whose result, inside lanes(f), has
//   count(), first()     how many there are; the first of them, if there is one
//   each(f)              f(k, slot) for each, in order
//   batches<most>(f)     f(first, n, slot_of) for up to `most` at a time: slot_of(i) is the slot of the
//                        i-th of the n in it, and `first` is true for the first batch
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "moiety/base/host_device.h"
#include "moiety/base/integer.h"

#ifndef __CUDACC__
#include <atomic>
#include <chrono>
#include <thread>

#include "moiety/comm/flags.h"
#endif

// A function that nvcc compiles for GPUs alone, and the host's compiler for the host.
#ifdef __CUDACC__
#define MOIETY_STEP __device__ inline
#define MOIETY_UNROLL _Pragma("unroll")
#else
#define MOIETY_STEP inline
#define MOIETY_UNROLL
#endif

namespace moiety::moe::peers {

// Words that cross ranks, and the clock of the waits for them.
#ifdef __CUDACC__
MOIETY_STEP void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
// For this GPU's blocks alone.
MOIETY_STEP void store_release_here(uint64_t* word, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
MOIETY_STEP uint64_t load_acquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
MOIETY_STEP void store_relaxed(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
MOIETY_STEP uint64_t load_relaxed(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
MOIETY_STEP uint64_t nanoseconds() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}
MOIETY_STEP void pause() {}
#else
MOIETY_STEP void store_release(uint64_t* word, uint64_t value) {
  comm::store_release(*word, value);
}
MOIETY_STEP void store_release_here(uint64_t* word, uint64_t value) {
  comm::store_release(*word, value);
}
MOIETY_STEP uint64_t load_acquire(const uint64_t* word) {
  return comm::load_acquire(const_cast<uint64_t&>(*word));
}
MOIETY_STEP void store_relaxed(uint64_t* word, uint64_t value) {
  comm::store_relaxed(*word, value);
}
MOIETY_STEP uint64_t load_relaxed(const uint64_t* word) {
  return comm::load_relaxed(const_cast<uint64_t&>(*word));
}
MOIETY_STEP uint64_t nanoseconds() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() /
                               std::chrono::nanoseconds(1));
}
MOIETY_STEP void pause() { std::this_thread::yield(); }
#endif

// Changes of numbers that several threads of a rank make; no place depends on their order.
MOIETY_STEP uint32_t exchange(uint32_t* x, uint32_t value) {
#ifdef __CUDACC__
  return atomicExch(x, value);
#else
  return std::atomic_ref(*x).exchange(value);
#endif
}
MOIETY_STEP uint32_t look(const uint32_t* x) {
#ifdef __CUDACC__
  return *static_cast<const volatile uint32_t*>(x);
#else
  return std::atomic_ref(const_cast<uint32_t&>(*x)).load(std::memory_order_relaxed);
#endif
}
template <class T>
MOIETY_STEP void add(T* x, T value) {
#ifdef __CUDACC__
  atomicAdd(x, value);
#else
  std::atomic_ref(*x).fetch_add(value, std::memory_order_relaxed);
#endif
}
MOIETY_STEP void raise(unsigned long long* x, unsigned long long value) {
#ifdef __CUDACC__
  atomicMax(x, value);
#else
  std::atomic_ref a(*x);
  auto now = a.load(std::memory_order_relaxed);
  while (now < value && !a.compare_exchange_weak(now, value, std::memory_order_relaxed)) {
  }
#endif
}
MOIETY_STEP void keep_bits(unsigned long long* x, unsigned long long mask) {
#ifdef __CUDACC__
  atomicAnd(x, mask);
#else
  std::atomic_ref(*x).fetch_and(mask, std::memory_order_relaxed);
#endif
}

// Sets a bit that other threads may set, too, or others of the same number.
MOIETY_STEP void set_bit(unsigned long long* x, int bit) {
#ifdef __CUDACC__
  atomicOr(reinterpret_cast<unsigned*>(x) + bit / 32, 1u << bit % 32);
#else
  std::atomic_ref(*x).fetch_or(1ull << bit, std::memory_order_relaxed);
#endif
}
// Whether the caller is the last of `all` that come here; then it sees what the others did before.
// The count is 0 before and afterwards.
MOIETY_STEP bool comes_last(uint32_t* count, int64_t all) {
#ifdef __CUDACC__
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(count)
               : "memory");
#else
  const uint32_t before = std::atomic_ref(*count).fetch_add(1, std::memory_order_acq_rel);
#endif
  if (before + 1 != all) return false;
  *count = 0;
  return true;
}
MOIETY_STEP unsigned long long load_bits(const unsigned long long* x) {
#ifdef __CUDACC__
  return *static_cast<const volatile unsigned long long*>(x);
#else
  return std::atomic_ref(const_cast<unsigned long long&>(*x)).load(std::memory_order_relaxed);
#endif
}

// Number i of things of which an item has `each`. There are fewer than 2^32 of them, since the rows
// of more would not fit into a memory.
struct Split {
  int64_t item, rest;

  MOIETY_HD_INLINE Split(int64_t i, int64_t each) {
    const auto number = static_cast<uint32_t>(i), by = static_cast<uint32_t>(each);
    item = number / by;
    rest = number % by;
  }
};

// Runs of bytes, moved in units of `unit` bytes: 16, 4, 2 or 1 (copy_kernel.h).
template <int n>
struct alignas(n) Unit {
  std::byte bytes[n];
};
#ifdef __CUDACC__
template <int n>
using UnitWord = std::conditional_t<
    n == 16, uint4,
    std::conditional_t<
        n == 8, uint2,
        std::conditional_t<n == 4, uint32_t, std::conditional_t<n == 2, uint16_t, uint8_t>>>>;
#endif
template <int n>
MOIETY_STEP Unit<n> load_unit(const std::byte* from) {
  Unit<n> out;
#ifdef __CUDACC__
  const auto v = *reinterpret_cast<const UnitWord<n>*>(from);
  memcpy(&out, &v, n);
#else
  std::memcpy(&out, from, n);
#endif
  return out;
}
template <int n>
MOIETY_STEP void store_unit(std::byte* to, const Unit<n>& x) {
#ifdef __CUDACC__
  UnitWord<n> v;
  memcpy(&v, &x, n);
  *reinterpret_cast<UnitWord<n>*>(to) = v;
#else
  std::memcpy(to, &x, n);
#endif
}
// Calls f.template operator()<n>() for the unit.
template <class F>
MOIETY_STEP void with_unit(int unit, F&& f) {
  if (unit == 16) {
    f.template operator()<16>();
  } else if (unit == 4) {
    f.template operator()<4>();
  } else if (unit == 2) {
    f.template operator()<2>();
  } else {
    f.template operator()<1>();
  }
}
template <class Warp>
MOIETY_STEP void copy_bytes(Warp& warp, std::byte* to, const std::byte* from, int64_t bytes,
                            int unit) {
  with_unit(unit, [&]<int n>() {
    warp.each(bytes / n, [&](int64_t i) { store_unit<n>(to + i * n, load_unit<n>(from + i * n)); });
  });
}
template <class Warp>
MOIETY_STEP void zero_bytes(Warp& warp, std::byte* to, int64_t bytes, int unit) {
  with_unit(unit, [&]<int n>() {
    warp.each(bytes / n, [&](int64_t i) { store_unit<n>(to + i * n, Unit<n>{}); });
  });
}

template <class T>
MOIETY_STEP T load(const std::byte* from) {
  T out;
  const auto held = load_unit<sizeof(T)>(from);
  memcpy(static_cast<void*>(&out), &held, sizeof(T));
  return out;
}
template <class T>
MOIETY_STEP void store(std::byte* to, const T& value) {
  Unit<sizeof(T)> held;
  memcpy(&held, &value, sizeof(T));
  store_unit<sizeof(T)>(to, held);
}

}  // namespace moiety::moe::peers
