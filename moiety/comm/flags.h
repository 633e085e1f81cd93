// Words in symmetric memory, stored with release and loaded with acquire on a CPU
// (docs/spec/ep.md#memory-order).
#pragma once

#include <atomic>
#include <cstdint>

namespace moiety::comm {

// Makes everything written before visible to a peer that loads this value.
inline void store_release(uint64_t& word, uint64_t value) {
  std::atomic_ref<uint64_t>(word).store(value, std::memory_order_release);
}
inline uint64_t load_acquire(uint64_t& word) {
  return std::atomic_ref<uint64_t>(word).load(std::memory_order_acquire);
}
inline void store_relaxed(uint64_t& word, uint64_t value) {
  std::atomic_ref<uint64_t>(word).store(value, std::memory_order_relaxed);
}
inline uint64_t load_relaxed(uint64_t& word) {
  return std::atomic_ref<uint64_t>(word).load(std::memory_order_relaxed);
}

}  // namespace moiety::comm
