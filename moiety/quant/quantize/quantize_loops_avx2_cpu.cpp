// Loops that compilers vectorize less well, written with AVX2: codes narrowed to bytes, maxima of
// short blocks. The file is compiled for AVX2 as a whole, with its codecs, since vectors are
// lowered before functions are inlined.
#include <algorithm>
#include <bit>
#include <cstring>

#include "moiety/quant/cpu_path.h"
#include "moiety/quant/quantize/quantize_encode.h"
#include "moiety/quant/quantize/quantize_loops_avx2.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moiety::quant::loops {

#if defined(__x86_64__)
namespace {

using Floats __attribute__((vector_size(32))) = float;
using Words __attribute__((vector_size(32))) = uint32_t;

// kBlock is the number of elements that share a factor, and factors follow each other in row.even;
// with 0 every element has its own.
template <class F, bool kStochastic, int kBlock = 0>
struct Avx2 {
  // Magnitudes of 16 elements of a row as 16-bit codes.
  MOIETY_INLINE static __m256i magnitudes(const Row<bf16>& row, int64_t i, Words w) {
    Floats even, odd;
    if constexpr (kBlock == 0) {
      std::memcpy(&even, row.even + i / 2, sizeof even);
      std::memcpy(&odd, row.odd + i / 2, sizeof odd);
    } else {
      even = odd = Floats{} + row.even[i / kBlock];
    }
    even *= reinterpret_cast<Floats>((w & 0x7FFFu) << 16);
    odd *= reinterpret_cast<Floats>(w & 0x7FFF0000u);
    Words a, b;
    if constexpr (kStochastic) {
      const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row.random + i));
      const auto r8 = reinterpret_cast<Words>(_mm256_cvtepu8_epi16(bytes));
      a = F::template encode_magnitude_stochastic<Words>(even, Words(r8 & 0xFFFFu));
      b = F::template encode_magnitude_stochastic<Words>(odd, Words(r8 >> 16));
    } else {
      a = F::template encode_magnitude<Words>(even);
      b = F::template encode_magnitude<Words>(odd);
    }
    return _mm256_blend_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b << 16),
                              0xAA);
  }
  // The codes of 32 elements as bytes, in the order in which packing leaves them.
  MOIETY_INLINE static __m256i codes32(const Row<bf16>& row, int64_t i) {
    const auto* x = reinterpret_cast<const __m256i*>(row.x + i);
    const __m256i low = _mm256_loadu_si256(x), high = _mm256_loadu_si256(x + 1);
    const __m256i code =
        _mm256_packus_epi16(magnitudes(row, i, reinterpret_cast<Words>(low)),
                            magnitudes(row, i + 16, reinterpret_cast<Words>(high)));
    const __m256i sign = _mm256_and_si256(_mm256_packs_epi16(low, high), _mm256_set1_epi8(-128));
    return _mm256_or_si256(code, kBits<F> == 8 ? sign : _mm256_srli_epi16(sign, 4));
  }
  // The nibbles of 64 elements.
  MOIETY_INLINE static __m256i nibbles64(const Row<bf16>& row, int64_t i) {
    const __m256i weights = _mm256_set1_epi16(0x1001);  // 1 for the even code, 16 for the odd one
    const __m256i pairs = _mm256_packus_epi16(_mm256_maddubs_epi16(codes32(row, i), weights),
                                              _mm256_maddubs_epi16(codes32(row, i + 32), weights));
    return _mm256_permutevar8x32_epi32(pairs, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }

  MOIETY_INLINE static void encode(const Row<bf16>& row, uint8_t* codes) {
    const int64_t i = encode_steps(row, codes);
    Finite<F, kStochastic>::encode(row.from(i), codes + i * kBits<F> / 8);
  }
  // Encodes whole vectors of codes; returns the number of elements.
  static constexpr int64_t kStep = 256 / kBits<F>;
  MOIETY_INLINE static int64_t encode_steps(const Row<bf16>& row, uint8_t* codes) {
    int64_t i = 0;
    for (; i + kStep <= row.n; i += kStep) {
      __m256i out;
      if constexpr (kBits<F> == 8) {
        out = _mm256_permute4x64_epi64(codes32(row, i), 0xD8);
      } else {
        out = nibbles64(row, i);
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i * kBits<F> / 8), out);
    }
    return i;
  }
};

template <class F, bool kStochastic>
void encode_finite(const Rows& rows, const PairFactors& factor, const uint8_t* random,
                   uint8_t* codes) {
  encode_rows<Avx2<F, kStochastic>, F, bf16>(rows, factor, random, codes);
}

// Encodes a row in blocks.
template <class F, bool kStochastic, int kBlock>
void encode_blocks(const bf16* x, const float* factor, int64_t n, const uint8_t* random,
                   uint8_t* codes) {
  using Fast = Avx2<F, kStochastic, kBlock>;
  const int64_t i = Fast::encode_steps({x, factor, factor, random, n}, codes);
  alignas(32) float pairs[Fast::kStep / 2];
  spread(factor + i / kBlock, kBlock, (n - i) / kBlock, pairs);
  Finite<F, kStochastic>::encode(
      Row<bf16>{x + i, pairs, pairs, kStochastic ? random + i : nullptr, n - i},
      codes + i * kBits<F> / 8);
}

// The codes of products with powers of two, in 16-bit lanes. Such a product is a BF16 value whose
// exponent changes by an integer, and rounding to normal codes rounds its bits. Rows are taken in
// chunks; a chunk with codes of subnormals (other than zeros) is encoded the general way.
template <class F>
struct Powers {
  static constexpr int64_t kChunk = 128;
  static constexpr int kDropped = 7 - F::kMantissaBits;
  // The offset from the bits of a product to bits with F's exponent, which includes the bits of the
  // factor 1.0.
  static constexpr int kBias = 127 * 128 + (std::bit_cast<int>(F::kLeastNormal) >> 16) - 128;

  // Loads the numbers that are subtracted from the bits of elements.
  MOIETY_INLINE static void load_offsets(const float* even, const float* odd, int64_t n,
                                         __m256i* out) {
    for (int64_t i = 0; i < n / 2; i += 8) {
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + i));
      const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + i));
      const __m256i bits = _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xAA);
      *out++ = _mm256_sub_epi16(_mm256_set1_epi16(kBias), bits);
    }
  }
  // `least` becomes 0 where an element is not 0 but its product is below the least normal value.
  // For zeros the subtraction of one wraps around.
  MOIETY_INLINE static __m256i magnitudes(__m256i x, __m256i offset, __m256i& least) {
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i a = _mm256_and_si256(x, _mm256_set1_epi16(0x7FFF));
    const __m256i limit = _mm256_add_epi16(offset, _mm256_set1_epi16(126));
    least = _mm256_min_epu16(least, _mm256_subs_epu16(_mm256_sub_epi16(a, one), limit));
    const __m256i y =
        _mm256_min_epu16(_mm256_subs_epu16(a, offset), _mm256_set1_epi16(F::kMaxCode << kDropped));
    const __m256i last = _mm256_and_si256(_mm256_srli_epi16(y, kDropped), one);
    const __m256i half = _mm256_set1_epi16((1 << (kDropped - 1)) - 1);
    return _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(y, half), last), kDropped);
  }
  // n is a multiple of 32. If it returns false, the codes mean nothing.
  MOIETY_INLINE static bool encode(const bf16* x, const __m256i* offset, int64_t n,
                                   uint8_t* codes) {
    __m256i least = _mm256_set1_epi16(-1);
    for (int64_t i = 0; i < n; i += 32, offset += 2) {
      const auto* at = reinterpret_cast<const __m256i*>(x + i);
      const __m256i low = _mm256_loadu_si256(at), high = _mm256_loadu_si256(at + 1);
      const __m256i code = _mm256_packus_epi16(magnitudes(low, offset[0], least),
                                               magnitudes(high, offset[1], least));
      const __m256i sign = _mm256_and_si256(_mm256_packs_epi16(low, high), _mm256_set1_epi8(-128));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i),
                          _mm256_permute4x64_epi64(_mm256_or_si256(code, sign), 0xD8));
    }
    const __m256i bad = _mm256_cmpeq_epi16(least, _mm256_setzero_si256());
    return _mm256_testz_si256(bad, bad);
  }
};

// Not inlined, since this exception would take the registers of the usual case.
template <class F>
__attribute__((noinline)) void encode_chunk(const bf16* x, const PairFactors& factor, int64_t n,
                                            uint8_t* codes) {
  Avx2<F, false>::encode({x, factor.even, factor.odd, nullptr, n}, codes);
}

template <class F>
void encode_powers(const Rows& rows, const PairFactors& factor, const uint8_t*, uint8_t* codes) {
  using P = Powers<F>;
  __m256i offsets[P::kChunk / 16];
  for (int64_t i = 0; i < rows.n; i += P::kChunk) {
    const int64_t n = std::min(P::kChunk, rows.n - i);
    P::load_offsets(factor.even + i / 2, factor.odd + i / 2, n, offsets);
    for (int64_t r = 0; r < rows.rows; ++r) {
      const bf16* x = static_cast<const bf16*>(rows.row(r)) + i;
      uint8_t* out = codes + r * rows.n + i;
      if (n % 32 == 0 && P::encode(x, offsets, n, out)) continue;
      encode_chunk<F>(x, {factor.even + i / 2, factor.odd + i / 2}, n, out);
    }
  }
}

// The same for a row in blocks: a factor serves whole vectors.
template <class F, int kBlock>
void encode_power_blocks(const bf16* x, const float* factor, int64_t n, const uint8_t*,
                         uint8_t* codes) {
  using P = Powers<F>;
  const auto chunk = [&](int64_t i, int64_t m) __attribute__((always_inline)) {
    const float* of = factor + i / kBlock;
    __m256i offsets[P::kChunk / 16] = {};
#ifndef MOIETY_NO_SIMD_CLONES  // the checks of sanitizers split the loop
#pragma GCC unroll 8
#endif
    for (int64_t v = 0; v < m / 16; ++v) {
      const auto bits = static_cast<int>(std::bit_cast<uint32_t>(of[16 * v / kBlock]) >> 16);
      offsets[v] = _mm256_set1_epi16(static_cast<int16_t>(P::kBias - bits));
    }
    if (P::encode(x + i, offsets, m, codes + i)) return;
    alignas(32) float pairs[P::kChunk / 2];
    spread(of, kBlock, m / kBlock, pairs);
    encode_chunk<F>(x + i, {pairs, pairs}, m, codes + i);
  };
  int64_t i = 0;
  for (; i + P::kChunk <= n; i += P::kChunk) chunk(i, P::kChunk);
  if (i < n) chunk(i, n - i);
}

// The magnitudes of 16 elements, each the largest over kBlock / 16 groups.
template <int kBlock>
MOIETY_INLINE __m256i block_magnitudes(const bf16* x) {
  const __m256i mask = _mm256_set1_epi16(0x7FFF);
  __m256i out = _mm256_setzero_si256();
  for (int i = 0; i < kBlock; i += 16) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    out = _mm256_max_epu16(out, _mm256_and_si256(v, mask));
  }
  return out;
}

// Takes eight blocks at a time: halves of two vectors are interleaved and compared until a vector
// holds one maximum of each.
template <int kBlock>
void amax_of_blocks(const bf16* x, int64_t blocks, uint32_t* out) {
  for (int64_t b = 0; b < blocks; b += 8) {
    __m256i m[8];
    for (int i = 0; i < 8; ++i) m[i] = block_magnitudes<kBlock>(x + (b + i) * kBlock);
    for (int i = 0; i < 8; i += 2) {
      m[i] = _mm256_max_epu16(_mm256_unpacklo_epi16(m[i], m[i + 1]),
                              _mm256_unpackhi_epi16(m[i], m[i + 1]));
    }
    for (int i = 0; i < 8; i += 4) {
      m[i] = _mm256_max_epu16(_mm256_unpacklo_epi32(m[i], m[i + 2]),
                              _mm256_unpackhi_epi32(m[i], m[i + 2]));
    }
    m[0] = _mm256_max_epu16(_mm256_unpacklo_epi64(m[0], m[4]), _mm256_unpackhi_epi64(m[0], m[4]));
    const __m128i largest =
        _mm_max_epu16(_mm256_castsi256_si128(m[0]), _mm256_extracti128_si256(m[0], 1));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + b),
                        _mm256_slli_epi32(_mm256_cvtepu16_epi32(largest), 16));
  }
}

bool present() { return quant::detail::by_avx2(); }

template <class F>
Encode find(bool stochastic, Known known) {
  if (stochastic) return encode_finite<F, true>;
  if constexpr (kBits<F> == 8) {
    if (known == Known::kPowers) return encode_powers<F>;
  }
  return encode_finite<F, false>;
}

}  // namespace

Encode encode_avx2(DType element, bool stochastic, Known known) {
  if (!present() || known == Known::kNothing) return nullptr;
  switch (element) {
    case DType::kE2M1:
      return find<E2M1>(stochastic, known);
    case DType::kE5M2:
      return find<E5M2>(stochastic, known);
    default:
      return find<E4M3>(stochastic, known);
  }
}

EncodeBlocks encode_blocks_avx2(DType element, int block, bool stochastic, Known known) {
  if (!present() || known == Known::kNothing) return nullptr;
  if (element == DType::kE2M1) {
    if (block != 16) return nullptr;
    return stochastic ? encode_blocks<E2M1, true, 16> : encode_blocks<E2M1, false, 16>;
  }
  if (stochastic || known != Known::kPowers) return nullptr;
  const bool e5m2 = element == DType::kE5M2;
  if (block == 32) return e5m2 ? encode_power_blocks<E5M2, 32> : encode_power_blocks<E4M3, 32>;
  if (block == 128) return e5m2 ? encode_power_blocks<E5M2, 128> : encode_power_blocks<E4M3, 128>;
  return nullptr;
}

int64_t block_amax_avx2(const bf16* x, int block, int64_t blocks, uint32_t* out) {
  if (!present()) return 0;
  blocks = blocks / 8 * 8;
  if (block == 16) amax_of_blocks<16>(x, blocks, out);
  if (block == 32) amax_of_blocks<32>(x, blocks, out);
  if (block == 128) amax_of_blocks<128>(x, blocks, out);
  return blocks;
}

#else

Encode encode_avx2(DType, bool, Known) { return nullptr; }
EncodeBlocks encode_blocks_avx2(DType, int, bool, Known) { return nullptr; }
int64_t block_amax_avx2(const bf16*, int, int64_t, uint32_t*) { return 0; }

#endif

}  // namespace moiety::quant::loops
