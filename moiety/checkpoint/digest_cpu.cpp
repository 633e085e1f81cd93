#include <cstring>

#include "moiety/base/simd.h"
#include "moiety/checkpoint/digest.h"

namespace moiety::checkpoint {
namespace {

MOIETY_INLINE uint64_t mix(uint64_t z) {
  z ^= z >> 30;
  z *= 0xBF58476D1CE4E5B9u;
  z ^= z >> 27;
  z *= 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

template <class Bits>
MOIETY_INLINE uint64_t sum_run(const std::byte* data, int64_t n, uint64_t first) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    Bits element;
    std::memcpy(&element, data + i * static_cast<int64_t>(sizeof(Bits)), sizeof(Bits));
    sum += mix(mix(first + static_cast<uint64_t>(i) + 0x9E3779B97F4A7C15u) + element);
  }
  return sum;
}

}  // namespace

MOIETY_SIMD_CLONES
uint64_t digest_run(const std::byte* data, int64_t element_bytes, int64_t n, uint64_t first) {
  switch (element_bytes) {
    case 1:
      return sum_run<uint8_t>(data, n, first);
    case 2:
      return sum_run<uint16_t>(data, n, first);
    case 4:
      return sum_run<uint32_t>(data, n, first);
    default:
      return sum_run<uint64_t>(data, n, first);
  }
}

}  // namespace moiety::checkpoint
