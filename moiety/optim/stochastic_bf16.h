// The storing of moments: as they are, or as bf16 with stochastic rounding.
#pragma once

#include <cstdint>

#include "moiety/base/rng.h"
#include "moiety/formats/bf16.h"

namespace moiety::optim {

enum class Moment : uint32_t { kExpAvg = 0, kExpAvgSq = 1 };

// The counter of rng domain 2 for the four elements 4*block .. 4*block + 3 of a logical tensor.
MOIETY_HD_INLINE PhiloxBlock moment_counter(uint64_t block, uint32_t tensor_id, uint32_t t,
                                            Moment which) {
  return {static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), tensor_id,
          2 * t + static_cast<uint32_t>(which)};
}

// Rounds x with the low 16 bits of the random word.
MOIETY_HD_INLINE bf16 round_stochastic(float x, uint32_t word) {
  return bf16::from_bits(bf16::encode_stochastic(x, static_cast<uint16_t>(word)));
}

}  // namespace moiety::optim
