// The random Hadamard transform of 16 values: signs, then the unnormalized Walsh-Hadamard
// butterfly, then a quarter of it. It is orthogonal, so a product summed over blocks of 16 is
// unchanged when both operands are transformed with the same signs. Each addition is rounded, in
// this order.
#pragma once

#include <bit>
#include <utility>

#include "moiety/formats/bf16.h"

namespace moiety::quant {

namespace detail {

// Indices are constants rather than loop variables, so that values are registers, in kernels and in
// loops that are vectorized over blocks.
using Pairs = std::make_integer_sequence<int, 8>;
using Elements = std::make_integer_sequence<int, 16>;

MOIETY_HD_INLINE constexpr void add_and_subtract(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}
// One level: pairs (i, i + kDistance) where i & kDistance is 0.
template <int kDistance, int... kPair>
MOIETY_HD_INLINE constexpr void butterfly(float (&w)[16], std::integer_sequence<int, kPair...>) {
  (add_and_subtract(w[kPair + (kPair & -kDistance)], w[kPair + (kPair & -kDistance) + kDistance]),
   ...);
}
MOIETY_HD_INLINE constexpr void hadamard(float (&w)[16]) {
  butterfly<1>(w, Pairs{});
  butterfly<2>(w, Pairs{});
  butterfly<4>(w, Pairs{});
  butterfly<8>(w, Pairs{});
}
template <int... kElement>
MOIETY_HD_INLINE constexpr void quarter_hadamard(float (&w)[16],
                                                 std::integer_sequence<int, kElement...>) {
  hadamard(w);
  ((w[kElement] = 0.25f * w[kElement]), ...);
}

// Changes the sign of elements whose bit of signs is set.
template <int... kElement>
MOIETY_HD_INLINE constexpr void flip(float (&x)[16], uint32_t signs,
                                     std::integer_sequence<int, kElement...>) {
  ((x[kElement] = std::bit_cast<float>(std::bit_cast<uint32_t>(x[kElement]) ^
                                       (signs << (31 - kElement) & (1u << 31)))),
   ...);
}
template <int... kElement>
MOIETY_HD_INLINE constexpr void round_to_bf16(float (&x)[16],
                                              std::integer_sequence<int, kElement...>) {
  ((x[kElement] = bf16(x[kElement])), ...);
}

}  // namespace detail

// Turns x, BF16 values with +0.0 past the end, into the rotated block before it is rounded.
MOIETY_HD_INLINE constexpr void rotate_unrounded(float (&x)[16], uint16_t signs) {
  detail::flip(x, signs, detail::Elements{});
  detail::quarter_hadamard(x, detail::Elements{});
}

// Turns x into the rotated block, rounded to BF16.
MOIETY_HD_INLINE constexpr void apply_rht(float (&x)[16], uint16_t signs) {
  rotate_unrounded(x, signs);
  detail::round_to_bf16(x, detail::Elements{});
}

// The inverse in FP32: butterfly, quarter, then the signs.
MOIETY_HD_INLINE constexpr void undo_rht(float (&y)[16], uint16_t signs) {
  detail::quarter_hadamard(y, detail::Elements{});
  detail::flip(y, signs, detail::Elements{});
}

}  // namespace moiety::quant
