// Transposes of matrices of bytes and of nibbles, in registers. Internal to the CPU paths of
// moiety/quant.
#pragma once

#include <cstdint>
#include <cstring>

#include "moiety/base/simd.h"

namespace moiety::quant {

using Bytes16 __attribute__((vector_size(16))) = uint8_t;

MOIETY_INLINE Bytes16 load_bytes(const uint8_t* at) {
  Bytes16 out;
  std::memcpy(&out, at, sizeof out);
  return out;
}

// out[c * out_pitch + r] = byte c of row(r), for r, c < 16.
template <class Row>
MOIETY_INLINE void transpose_16x16(Row&& row, uint8_t* out, int64_t out_pitch) {
  Bytes16 a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = row(i);
  // Each step interleaves the two halves of the rows; after four the indices have changed places.
  const auto step = [](const Bytes16* from, Bytes16* to) __attribute__((always_inline)) {
    for (int i = 0; i < 8; ++i) {
      to[2 * i] = __builtin_shufflevector(from[i], from[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20,
                                          5, 21, 6, 22, 7, 23);
      to[2 * i + 1] = __builtin_shufflevector(from[i], from[i + 8], 8, 24, 9, 25, 10, 26, 11, 27,
                                              12, 28, 13, 29, 14, 30, 15, 31);
    }
  };
  step(a, b);
  step(b, a);
  step(a, b);
  step(b, a);
  for (int i = 0; i < 16; ++i) std::memcpy(out + i * out_pitch, &a[i], 16);
}

// out[c * out_pitch + r] = in[r * in_pitch + c], for rows x cols bytes, both multiples of 16.
MOIETY_INLINE void transpose_bytes(const uint8_t* in, int64_t in_pitch, int64_t rows, int64_t cols,
                                   uint8_t* out, int64_t out_pitch) {
  for (int64_t c = 0; c < cols; c += 16) {
    for (int64_t r = 0; r < rows; r += 16) {
      const uint8_t* from = in + r * in_pitch + c;
      transpose_16x16([&](int i) { return load_bytes(from + i * in_pitch); },
                      out + c * out_pitch + r, out_pitch);
    }
  }
}

// The same for nibbles, low ones first; rows and cols (in nibbles) are multiples of 32. Two rows
// and two columns share bytes on either side.
MOIETY_INLINE void transpose_nibbles(const uint8_t* in, int64_t in_pitch, int64_t rows,
                                     int64_t cols, uint8_t* out, int64_t out_pitch) {
  for (int64_t c = 0; c < cols; c += 32) {
    for (int64_t r = 0; r < rows; r += 32) {
      const uint8_t* from = in + r * in_pitch + c / 2;
      uint8_t* to = out + c * out_pitch + r / 2;
      const auto upper = [&](int i) { return load_bytes(from + 2 * i * in_pitch); };
      const auto lower = [&](int i) { return load_bytes(from + (2 * i + 1) * in_pitch); };
      transpose_16x16([&](int i) { return (upper(i) & 15) | (lower(i) << 4); }, to, 2 * out_pitch);
      transpose_16x16([&](int i) { return (upper(i) >> 4) | (lower(i) & 0xF0); }, to + out_pitch,
                      2 * out_pitch);
    }
  }
}

}  // namespace moiety::quant
