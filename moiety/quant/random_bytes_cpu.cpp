#include <cstring>

#include "moiety/quant/random_bytes.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moiety::quant {
namespace {

void random_bytes_portable(const RandomStream& stream, const RandomBlocks& which, uint8_t* out,
                           int64_t pitch) {
  for (int64_t r = 0; r < which.rows; ++r, out += pitch) {
    const uint64_t first = which.first + static_cast<uint64_t>(r) * which.step;
    for (int64_t i = 0; i < which.blocks; ++i) {
      const PhiloxBlock block = stream.block(first + static_cast<uint64_t>(i));
      for (int byte = 0; byte < 16; ++byte) out[16 * i + byte] = random_byte(block, byte);
    }
  }
}

#if defined(__x86_64__)
#define MOIETY_AVX2 __attribute__((target("avx2")))

// Blocks are computed side by side, four in the 64-bit lanes of each vector; two vectors hide the
// latency of multiplications. A lane's upper half holds the rest of a product: multiplications read
// only lower halves, and `store` drops the upper ones.
constexpr int kVectors = 2, kLanes = 4 * kVectors;
using Words = __m256i[kVectors];

MOIETY_AVX2 MOIETY_INLINE void philox_lanes(const __m256i (&keys)[20], Words (&w)[4]) {
  const __m256i m0 = _mm256_set1_epi64x(kPhiloxMultiplier0);
  const __m256i m2 = _mm256_set1_epi64x(kPhiloxMultiplier2);
  for (int round = 0; round < 10; ++round) {
    for (int v = 0; v < kVectors; ++v) {
      const __m256i a = _mm256_mul_epu32(w[0][v], m0);
      const __m256i b = _mm256_mul_epu32(w[2][v], m2);
      const __m256i keyed1 = _mm256_xor_si256(w[1][v], keys[2 * round]);
      const __m256i keyed3 = _mm256_xor_si256(w[3][v], keys[2 * round + 1]);
      w[0][v] = _mm256_xor_si256(_mm256_srli_epi64(b, 32), keyed1);
      w[1][v] = b;
      w[2][v] = _mm256_xor_si256(_mm256_srli_epi64(a, 32), keyed3);
      w[3][v] = a;
    }
  }
}

MOIETY_AVX2 MOIETY_INLINE void store(const Words (&w)[4], uint8_t* out) {
  auto* to = reinterpret_cast<__m256i*>(out);
  for (int v = 0; v < kVectors; ++v) {
    const __m256i low = _mm256_blend_epi32(w[0][v], _mm256_slli_epi64(w[1][v], 32), 0xAA);
    const __m256i high = _mm256_blend_epi32(w[2][v], _mm256_slli_epi64(w[3][v], 32), 0xAA);
    const __m256i even = _mm256_unpacklo_epi64(low, high);
    const __m256i odd = _mm256_unpackhi_epi64(low, high);
    _mm256_storeu_si256(to++, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(to++, _mm256_permute2x128_si256(even, odd, 0x31));
  }
}

MOIETY_AVX2 void random_bytes_avx2(const RandomStream& stream, const RandomBlocks& which,
                                   uint8_t* out, int64_t pitch) {
  __m256i keys[20];
  PhiloxKey key = stream.key;
  for (int round = 0; round < 10; ++round) {
    keys[2 * round] = _mm256_set1_epi64x(key[0]);
    keys[2 * round + 1] = _mm256_set1_epi64x(key[1]);
    key = next_round_key(key);
  }
  const __m256i upper = _mm256_set1_epi64x(stream.upper);
  for (int64_t r = 0; r < which.rows; ++r, out += pitch) {
    const uint64_t first = which.first + static_cast<uint64_t>(r) * which.step;
    __m256i b = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(first)),
                                 _mm256_setr_epi64x(0, 1, 2, 3));
    for (int64_t i = 0; i < which.blocks; i += kLanes) {
      Words words[4];
      for (int v = 0; v < kVectors; ++v) {
        words[0][v] = b;
        words[1][v] = _mm256_or_si256(_mm256_srli_epi64(b, 32), upper);
        words[2][v] = _mm256_set1_epi64x(stream.tensor_id);
        words[3][v] = _mm256_set1_epi64x(stream.draw);
        b = _mm256_add_epi64(b, _mm256_set1_epi64x(4));
      }
      philox_lanes(keys, words);
      if (which.blocks - i >= kLanes) {
        store(words, out + 16 * i);
      } else {
        uint8_t rest[16 * kLanes];
        store(words, rest);
        std::memcpy(out + 16 * i, rest, static_cast<size_t>(16 * (which.blocks - i)));
      }
    }
  }
}
#endif

}  // namespace

void random_bytes(const RandomStream& stream, const RandomBlocks& which, uint8_t* out,
                  int64_t pitch) {
#if defined(__x86_64__)
  static const bool fast = __builtin_cpu_supports("avx2");
  if (fast) return random_bytes_avx2(stream, which, out, pitch);
#endif
  random_bytes_portable(stream, which, out, pitch);
}

}  // namespace moiety::quant
