// Random bits of stochastic rounding (RNG domain 0). One Philox call serves one block of 16
// elements along a row, or along a row of X^T for the column direction. The position is that in the
// uncut tensor, so the bits depend neither on sharding or tiling nor on the device.
#pragma once

#include "moiety/base/rng.h"

namespace moiety::quant {

// The state, which kernels read from device memory, so that a replayed graph draws anew. `draw`
// advances once per quantization pass.
struct RngState {
  uint64_t seed = 0;
  uint64_t draw = 0;
};

// The random numbers of one tensor and direction in one pass.
struct RandomStream {
  PhiloxKey key;
  uint32_t tensor_id;
  uint32_t draw;
  uint32_t upper;  // bits 15 to 31 of the counter's second word: expert and direction

  // `expert` is the global number + 1, less than 2^16; 0 if the tensor belongs to no expert. With
  // `column` blocks lie along M.
  MOIETY_HD_INLINE static constexpr RandomStream make(RngState state, uint32_t tensor_id,
                                                      uint32_t expert, bool column) {
    return {rng_key(state.seed, RngDomain::kStochasticRounding), tensor_id,
            static_cast<uint32_t>(state.draw), expert << 15 | static_cast<uint32_t>(column) << 31};
  }
  // The 16 bytes of block b < 2^47.
  MOIETY_HD_INLINE constexpr PhiloxBlock block(uint64_t b) const { return block(b, draw); }
  // The second block of BF16, which takes 16 bits per element: the low byte from `block`, the high
  // byte from this one.
  MOIETY_HD_INLINE constexpr PhiloxBlock high_block(uint64_t b) const {
    return block(b, draw | 1u << 31);
  }

 private:
  MOIETY_HD_INLINE constexpr PhiloxBlock block(uint64_t b, uint32_t draw_word) const {
    return philox(key, {static_cast<uint32_t>(b),
                        (static_cast<uint32_t>(b >> 32) & 0x7FFFu) | upper, tensor_id, draw_word});
  }
};

// The place of a matrix in its uncut tensor. For the column direction everything is in terms of
// X^T: swap the row and column arguments.
struct BlockPosition {
  int64_t row0;
  int64_t block0;          // first column, in blocks
  int64_t blocks_per_row;  // of the uncut tensor

  // col0 is a multiple of 16.
  MOIETY_HD_INLINE static constexpr BlockPosition make(int64_t row0, int64_t col0,
                                                       int64_t full_cols) {
    return {row0, col0 / 16, (full_cols + 15) / 16};
  }
  // The number of the block that holds elements 16 * block to 16 * block + 15 of row `row`.
  MOIETY_HD_INLINE constexpr uint64_t block(int64_t row, int64_t block) const {
    return static_cast<uint64_t>(row0 + row) * static_cast<uint64_t>(blocks_per_row) +
           static_cast<uint64_t>(block0 + block);
  }
};

// Byte i (0 to 15) of a block: words in order, little-endian.
MOIETY_HD_INLINE constexpr uint8_t random_byte(const PhiloxBlock& block, int i) {
  return static_cast<uint8_t>(block[static_cast<unsigned>(i) >> 2] >> 8 * (i & 3));
}
MOIETY_HD_INLINE constexpr uint16_t random_half(const PhiloxBlock& low, const PhiloxBlock& high,
                                                int i) {
  return static_cast<uint16_t>(random_byte(low, i) | random_byte(high, i) << 8);
}

}  // namespace moiety::quant
