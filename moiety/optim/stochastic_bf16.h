// Storing moments: as they are, or as bf16 with stochastic rounding.
#pragma once

#include <bit>
#include <cstdint>

#include "moiety/base/rng.h"
#include "moiety/formats/bf16.h"

namespace moiety::optim {

enum class Moment : uint32_t { kExpAvg = 0, kExpAvgSq = 1 };

// Counter of rng domain 2 for the four elements 4*block .. 4*block + 3 of a logical tensor.
MOIETY_INLINE PhiloxBlock moment_counter(uint64_t block, uint32_t tensor_id, uint32_t t,
                                         Moment which) {
  return {static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), tensor_id,
          2 * t + static_cast<uint32_t>(which)};
}

// Adds the low 16 bits of the random word below the kept ones and cuts: rounds up with the
// probability of the fraction that is lost.
MOIETY_INLINE bf16 round_stochastic(float x, uint32_t word) {
  const uint32_t b = std::bit_cast<uint32_t>(x);
  const uint32_t sum = (b + (word & 0xFFFFu)) >> 16;
  const bool finite = (b & 0x7F800000u) != 0x7F800000u;
  return bf16::from_bits(finite ? static_cast<uint16_t>(sum) : bf16::encode(x));
}

}  // namespace moiety::optim
