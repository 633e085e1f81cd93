// Where a producer leaves the amax of what it stores, found while the rows are in the cache, so
// that quantize() with amax_given needs no pass of its own
// (docs/spec/formats.md#amax-from-elsewhere).
//
// After the operation amax holds the bits that compute_amax of the stored output gives, or
// compute_amax_grouped where the output's rows belong to groups; NaN and infinities show, an empty
// tensor or group has 0. The reference and the fast path of a producer share this code.
#pragma once

#include <cstdint>

#include "moiety/base/tensor_view.h"

namespace moiety::quant {

struct AmaxSink {
  TensorView amax = {};  // float32 [1], or [E] of groups; not defined: nobody asks

  bool defined() const { return amax.defined(); }

  // For producers. Throws unless there are `groups` values, and what is stored can be quantized.
  void check(const char* operation, DType stored, int64_t groups) const;
  void clear() const;
  // What was added stays a maximum, in any order, by any threads.
  void raise(int64_t group, uint32_t bits) const;
  // n elements that were stored, float32 or bf16.
  void add(int64_t group, DType dtype, const void* x, int64_t n) const;
};

// Bits of the largest |x|: unsigned, so NaN > inf > finite.
uint32_t amax_bits(DType dtype, const void* x, int64_t n);
// slot := max(slot, bits), atomically.
void raise_amax(float* slot, uint32_t bits);

}  // namespace moiety::quant
