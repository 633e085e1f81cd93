// Parts that the encoders of quantize_loops.h share. Internal to moiety/quant.
#pragma once

#include <bit>

#include "moiety/quant/quantize/quantize_loops.h"

namespace moiety::quant::loops {

// A word in the memory of two elements, or of their codes.
using Word16 __attribute__((aligned(1), may_alias)) = uint16_t;
using Word32 __attribute__((aligned(2), may_alias)) = uint32_t;

// Two elements: magnitudes, and the signs in bits 15 (of the even one) and 31.
struct Pair {
  float even, odd;
  uint32_t signs;
};
MOIETY_INLINE Pair load(const bf16* row, int64_t i) {
  const uint32_t w = reinterpret_cast<const Word32*>(row)[i];
  return {std::bit_cast<float>((w & 0x7FFFu) << 16), std::bit_cast<float>(w & 0x7FFF0000u),
          w & 0x80008000u};
}
MOIETY_INLINE Pair load(const float* row, int64_t i) {
  const uint32_t even = std::bit_cast<uint32_t>(row[2 * i]);
  const uint32_t odd = std::bit_cast<uint32_t>(row[2 * i + 1]);
  return {std::bit_cast<float>(even & 0x7FFFFFFFu), std::bit_cast<float>(odd & 0x7FFFFFFFu),
          (even >> 16 & 0x8000u) | (odd & 0x80000000u)};
}

// Bits that a code takes in the word of a pair.
template <class F>
constexpr int kBits = std::bit_width(F::kSignBit);
template <class F>
MOIETY_INLINE void store(uint8_t* codes, int64_t i, uint32_t word) {
  if constexpr (kBits<F> == 8) {
    reinterpret_cast<Word16*>(codes)[i] = static_cast<uint16_t>(word);
  } else {
    codes[i] = static_cast<uint8_t>(word);
  }
}

// The shift to the right comes last, which keeps vectorizers from narrowing each part by itself.
template <class F>
MOIETY_INLINE uint32_t join(uint32_t even, uint32_t odd, uint32_t signs) {
  constexpr int kShift = 16 - kBits<F>;
  return (even << kShift | odd << 16 | signs | signs >> kShift) >> kShift;
}

// A row, or the rest of one.
template <class T>
struct Row {
  const T* x;
  const float *even, *odd;
  const uint8_t* random;
  int64_t n;

  MOIETY_INLINE Row from(int64_t i) const {
    return {x + i, even + i / 2, odd + i / 2, random ? random + i : nullptr, n - i};
  }
};

template <class F, bool kStochastic, class T>
MOIETY_INLINE void encode_pairs(const T* __restrict x, const float* __restrict even,
                                const float* __restrict odd, const Word16* __restrict random,
                                int64_t pairs, uint8_t* __restrict codes) {
  for (int64_t i = 0; i < pairs; ++i) {
    const Pair p = load(x, i);
    const float a = p.even * even[i], b = p.odd * odd[i];
    if constexpr (kStochastic) {
      store<F>(codes, i,
               join<F>(F::encode_magnitude_stochastic(a, random[i] & 255u),
                       F::encode_magnitude_stochastic(b, uint32_t{random[i]} >> 8), p.signs));
    } else {
      store<F>(codes, i, join<F>(F::encode_magnitude(a), F::encode_magnitude(b), p.signs));
    }
  }
}

// The encoder for finite elements and finite, positive factors.
template <class F, bool kStochastic>
struct Finite {
  template <class T>
  MOIETY_INLINE static void encode(const Row<T>& row, uint8_t* codes) {
    encode_pairs<F, kStochastic>(row.x, row.even, row.odd,
                                 reinterpret_cast<const Word16*>(row.random), row.n / 2, codes);
  }
};

// Encodes rows of elements T by How::encode, one by one.
template <class How, class F, class T>
MOIETY_INLINE void encode_rows(const Rows& rows, const PairFactors& factor, const uint8_t* random,
                               uint8_t* codes) {
  for (int64_t r = 0; r < rows.rows; ++r) {
    How::encode(Row<T>{static_cast<const T*>(rows.row(r)), factor.even, factor.odd,
                       random ? random + r * rows.n : nullptr, rows.n},
                codes + r * rows.n * kBits<F> / 8);
  }
}

}  // namespace moiety::quant::loops
