// The part of an AmaxSink (amax_sink.h) that runs in kernels; the sink is cleared before them.
#pragma once

#include <cstdint>

namespace moiety::quant::device {

// slot := max(slot, bits of any lane). Whole warps call it; mostly the slot is large enough
// already.
__device__ inline void raise_amax(uint32_t* slot, uint32_t bits) {
  const uint32_t largest = __reduce_max_sync(0xFFFFFFFFu, bits);
  if (threadIdx.x % 32 == 0 && *static_cast<volatile uint32_t*>(slot) < largest) {
    atomicMax(slot, largest);
  }
}

}  // namespace moiety::quant::device
