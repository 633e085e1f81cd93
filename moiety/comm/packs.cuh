// Packs of elements that a thread carries from one place to others: all of them are loaded before the
// first is stored, so that they travel side by side.
#pragma once

#include <cstdint>

namespace moiety::comm {

// The packs first, first + kThreads, ..., of which a thread has kFlight, up to n: store(i, load(i)).
template <int kThreads, int kFlight, class Load, class Store>
__device__ void carry_packs(int64_t first, int64_t n, Load&& load, Store&& store) {
  decltype(load(int64_t{})) value[kFlight];
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    if (first + f * kThreads < n) value[f] = load(first + f * kThreads);
  }
#pragma unroll
  for (int f = 0; f < kFlight; ++f) {
    if (first + f * kThreads < n) store(first + f * kThreads, value[f]);
  }
}

}  // namespace moiety::comm
