// The transform of 16 rows with AVX2, sixteen columns at a time: even columns in the lanes of one
// set of vectors, odd ones in those of another. It serves only finite results, which need no
// selects. The file is compiled for AVX2 as a whole.
#include <bit>

#include "moiety/quant/cpu_path.h"
#include "moiety/quant/hadamard.h"
#include "moiety/quant/quantize/quantize_loops_avx2.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moiety::quant::loops {

#if defined(__x86_64__)
namespace {

constexpr int64_t kColumns = 16;  // columns in a vector of bf16

bool serves(const Rows& x) { return quant::detail::by_avx2() && x.dtype == DType::kBFloat16; }

// The rows with their signs changed, stored side by side: rows of X may lie so that a cache holds
// only eight of them.
struct SignedRows {
  alignas(64) bf16 at[16][kPanel];

  SignedRows(const Rows& x, uint16_t signs) {
    for (int r = 0; r < 16; ++r) {
      const __m256i flip = _mm256_set1_epi16(signs >> r & 1 ? INT16_MIN : 0);
      const auto* from = static_cast<const __m256i*>(x.row(r));
      auto* to = reinterpret_cast<__m256i*>(at[r]);
      for (int64_t i = 0; i < kPanel / kColumns; ++i) {
        _mm256_store_si256(to + i, _mm256_xor_si256(_mm256_loadu_si256(from + i), flip));
      }
    }
  }

  // Loads columns [c, c + 16) of row r, the even or the odd ones.
  template <bool kOdd>
  MOIETY_INLINE __m256 load(int64_t c, int r) const {
    const __m256i w = _mm256_load_si256(reinterpret_cast<const __m256i*>(at[r] + c));
    return _mm256_castsi256_ps(
        kOdd ? _mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u)))
             : _mm256_slli_epi32(w, 16));
  }
};

// Two levels of the butterfly: the pairs (a, b), (c, d), then (a, c), (b, d).
MOIETY_INLINE void two_levels(__m256& a, __m256& b, __m256& c, __m256& d) {
  const __m256 ab = _mm256_add_ps(a, b), a_b = _mm256_sub_ps(a, b);
  const __m256 cd = _mm256_add_ps(c, d), c_d = _mm256_sub_ps(c, d);
  a = _mm256_add_ps(ab, cd);
  b = _mm256_add_ps(a_b, c_d);
  c = _mm256_sub_ps(ab, cd);
  d = _mm256_sub_ps(a_b, c_d);
}

// The levels of distances 1 and 2.
template <bool kOdd>
MOIETY_INLINE void lower_levels(const SignedRows& x, int64_t c, __m256 (&w)[16]) {
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    __m256 v[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) v[k] = x.load<kOdd>(c, i + k);
    two_levels(v[0], v[1], v[2], v[3]);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) w[i + k] = v[k];
  }
}

// The BF16 bits of a quarter of w, in the upper halves; the lower halves mean nothing.
MOIETY_INLINE __m256i rounded_quarter(__m256 w) {
  const __m256i b = _mm256_castps_si256(_mm256_mul_ps(w, _mm256_set1_ps(0.25f)));
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7FFF)), last);
}

// The levels of distances 4 and 8 for rows i, i + 4, i + 8 and i + 12; calls store(row, bits).
template <class Store>
MOIETY_INLINE void upper_levels(const __m256 (&w)[16], Store&& store) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m256 v[4] = {w[i], w[i + 4], w[i + 8], w[i + 12]};
    two_levels(v[0], v[1], v[2], v[3]);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) store(i + 4 * k, rounded_quarter(v[k]));
  }
}

// The largest magnitude that the level of distance 8 will have: that of a + b and a - b is |a| +
// |b|, rounding included.
MOIETY_INLINE __m256i last_level_amax(const __m256 (&w)[16], __m256i m) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  const auto larger = [&](__m256 a, __m256 b) __attribute__((always_inline)) {
    const __m256 sum = _mm256_add_ps(_mm256_and_ps(a, magnitude), _mm256_and_ps(b, magnitude));
    m = _mm256_max_epu32(m, _mm256_castps_si256(sum));
  };
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    larger(_mm256_add_ps(w[i], w[i + 4]), _mm256_add_ps(w[i + 8], w[i + 12]));
    larger(_mm256_sub_ps(w[i], w[i + 4]), _mm256_sub_ps(w[i + 8], w[i + 12]));
  }
  return m;
}

}  // namespace

bool rotate_avx2(const Rows& rows, uint16_t signs, bf16 (*y)[kPanel], uint32_t* amax) {
  if (!serves(rows)) return false;
  const SignedRows x(rows, signs);
  const __m256i magnitude = _mm256_set1_epi16(0x7FFF);
  __m256i all = _mm256_setzero_si256();
  for (int64_t c = 0; c < kPanel; c += kColumns) {
    __m256 w[16];
    __m256i even[16], largest = _mm256_setzero_si256();
    lower_levels<false>(x, c, w);
    upper_levels(
        w, [&](int r, __m256i bits)
               __attribute__((always_inline)) { even[r] = _mm256_srli_epi32(bits, 16); });
    lower_levels<true>(x, c, w);
    upper_levels(
        w, [&](int r, __m256i bits) __attribute__((always_inline)) {
          const __m256i both = _mm256_blend_epi16(even[r], bits, 0xAA);
          largest = _mm256_max_epu16(largest, _mm256_and_si256(both, magnitude));
          _mm256_store_si256(reinterpret_cast<__m256i*>(y[r] + c), both);
        });
    auto* out = reinterpret_cast<__m256i*>(amax + c);
    const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(largest));
    const __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(largest, 1));
    _mm256_storeu_si256(out, _mm256_slli_epi32(low, 16));
    _mm256_storeu_si256(out + 1, _mm256_slli_epi32(high, 16));
    all = _mm256_max_epu16(all, largest);
  }
  const __m256i infinite = _mm256_cmpgt_epi16(all, _mm256_set1_epi16(0x7F7F));
  return _mm256_testz_si256(infinite, infinite);
}

std::optional<uint32_t> rotated_amax_avx2(const Rows& rows, uint16_t signs) {
  if (!serves(rows)) return std::nullopt;
  const SignedRows x(rows, signs);
  __m256i m = _mm256_setzero_si256();
  for (int64_t c = 0; c < kPanel; c += kColumns) {
    __m256 w[16];
    lower_levels<false>(x, c, w);
    m = last_level_amax(w, m);
    lower_levels<true>(x, c, w);
    m = last_level_amax(w, m);
  }
  alignas(32) uint32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), m);
  const uint32_t largest = loops::largest(lanes, 8);
  if (largest >= 0x7F800000u) return std::nullopt;
  return abs_bits(bf16(0.25f * std::bit_cast<float>(largest)));
}

#else

bool rotate_avx2(const Rows&, uint16_t, bf16 (*)[kPanel], uint32_t*) { return false; }
std::optional<uint32_t> rotated_amax_avx2(const Rows&, uint16_t) { return std::nullopt; }

#endif

}  // namespace moiety::quant::loops
