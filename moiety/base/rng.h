// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011). A number is a function of seed, domain and position alone, so it does not
// depend on layout, order or device. The domains never share a stream
// (docs/spec/README.md#random-numbers).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "moiety/base/host_device.h"

namespace moiety {

using PhiloxKey = std::array<uint32_t, 2>;
using PhiloxBlock = std::array<uint32_t, 4>;

enum class RngDomain : uint32_t {
  kStochasticRounding = 0,
  kInit = 1,
  kMoments = 2,
  kShuffle = 3,
  kValidationSplit = 4,
  kGeneration = 5,
};

MOIETY_HD constexpr PhiloxKey rng_key(uint64_t seed, RngDomain domain) {
  return {static_cast<uint32_t>(seed),
          static_cast<uint32_t>(seed >> 32) ^ (static_cast<uint32_t>(domain) * 0x9E3779B9u)};
}

inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53, kPhiloxMultiplier2 = 0xCD9E8D57;
MOIETY_HD_INLINE constexpr PhiloxKey next_round_key(PhiloxKey key) {
  return {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
}
MOIETY_HD_INLINE constexpr PhiloxBlock philox(PhiloxKey key, PhiloxBlock counter) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{kPhiloxMultiplier0} * counter[0];
    const uint64_t b = uint64_t{kPhiloxMultiplier2} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key = next_round_key(key);
  }
  return counter;
}

// The number of a tensor in random streams: crc32c of its checkpoint name (for a gradient, of name
// + ".dy").
uint32_t tensor_id(std::string_view name);

// The standard normal number of a 32-bit word: the inverse of the normal distribution at (word +
// 1/2) / 2^32 (Wichura's AS 241, in double), with Moiety's own logarithm, so that all devices give
// the same bits. Never infinite.
float normal_from_word(uint32_t word);

// Element i of the logical tensor in domain kInit: a standard normal number.
float init_normal(uint64_t seed, uint32_t tensor, uint64_t i);
// out[i] = scale * init_normal(seed, tensor, first + i) for i in [0, n); several times faster than
// calls one by one.
void init_normals(uint64_t seed, uint32_t tensor, uint64_t first, int64_t n, float scale,
                  float* out);

}  // namespace moiety
