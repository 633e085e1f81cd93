// A place where a producer leaves the amax of the values it stores, found while the rows are in the
// cache, so that quantize() with amax_given needs no pass of its own
// (docs/spec/formats.md#amax-from-elsewhere). Library only: producers fill it in, but the trainer's
// recipes do not ask for it.
//
// After the operation, amax holds the bits that compute_amax of the stored output gives, or
// compute_amax_grouped where the output's rows belong to groups. NaN and infinities show; an empty
// tensor or group has 0. The reference and the fast path of a producer share this code.
#pragma once

#include <cstdint>

#include "moiety/base/tensor_view.h"

namespace moiety::quant {

struct AmaxSink {
  TensorView amax = {};  // float32 [1], or [E] for groups; undefined: not wanted

  bool defined() const { return amax.defined(); }

  // Throws unless there are `groups` values, and the stored output can be quantized. For producers.
  void check(const char* operation, DType stored, int64_t groups) const;
  void clear() const;
  // Raises a group's amax to `bits`. The result is the maximum of all calls, in any order, by any
  // threads.
  void raise(int64_t group, uint32_t bits) const;
  // Raises a group's amax to that of n stored elements, float32 or bf16.
  void add(int64_t group, DType dtype, const void* x, int64_t n) const;
};

// The bits of the largest |x|, which order as unsigned numbers: NaN > inf > finite.
uint32_t amax_bits(DType dtype, const void* x, int64_t n);
// slot := max(slot, bits), atomically.
void raise_amax(float* slot, uint32_t bits);

}  // namespace moiety::quant
