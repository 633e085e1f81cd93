// Writes to large arrays that are not read soon: past the caches, so that their lines are not
// fetched first. Internal to the CPU paths of moiety/quant.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "moiety/base/simd.h"

namespace moiety::quant {

// Arrays from this size on would not stay in the caches of one core, or in its part of a common
// one.
constexpr int64_t kStreamedBytes = int64_t{2} << 20;

class ByteWriter {
 public:
  // A writer to an array of `bytes` bytes.
  explicit ByteWriter(int64_t bytes) : streams_(bytes >= kStreamedBytes) {}

  MOIETY_INLINE void write(void* to, const void* from, int64_t n) const {
#if defined(__x86_64__)
    if (streams_) return stream(static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), n);
#endif
    copy(to, from, n);
  }

  // Must come before other threads may read what this one wrote.
  static void finish() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
  }

 private:
  // Not inlined: compilers that know a bound of n make slow string instructions of it.
  __attribute__((noinline)) static void copy(void* to, const void* from, int64_t n) {
    std::memcpy(to, from, static_cast<size_t>(n));
  }
#if defined(__x86_64__)
  // Writes whole lines; parts of lines meet their other parts in the caches.
  static MOIETY_INLINE void stream(uint8_t* to, const uint8_t* from, int64_t n) {
    const int64_t head = std::min<int64_t>(n, -reinterpret_cast<intptr_t>(to) & 63);
    const int64_t body = (n - head) / 64 * 64;
    if (head > 0) std::memcpy(to, from, static_cast<size_t>(head));
    for (int64_t i = head; i < head + body; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
    const int64_t tail = n - head - body;
    if (tail > 0) std::memcpy(to + n - tail, from + n - tail, static_cast<size_t>(tail));
  }
#endif

  bool streams_;
};

}  // namespace moiety::quant
