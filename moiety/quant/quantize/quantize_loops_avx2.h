// Loops of quantize_loops.h for CPUs with AVX2. Internal to moiety/quant.
#pragma once

#include <optional>

#include "moiety/quant/quantize/quantize_loops.h"

namespace moiety::quant::loops {

// The encoder of bf16 elements; null without AVX2, and if nothing is known.
Encode encode_avx2(DType element, bool stochastic, Known known);

// The codes of a row of n elements in blocks with a factor each; null where `encode` has to do it.
using EncodeBlocks = void (*)(const bf16* x, const float* factor, int64_t n, const uint8_t* random,
                              uint8_t* codes);
EncodeBlocks encode_blocks_avx2(DType element, int block, bool stochastic, Known known);

// Does the first blocks of `block_amax` and returns how many; 0 without AVX2.
int64_t block_amax_avx2(const bf16* x, int block, int64_t blocks, uint32_t* out);

// `rotate` and `rotated_amax` for bf16 elements with finite results. Otherwise, and without AVX2,
// they return false, and their output means nothing.
bool rotate_avx2(const Rows& x, uint16_t signs, bf16 (*y)[kPanel], uint32_t* amax);
std::optional<uint32_t> rotated_amax_avx2(const Rows& x, uint16_t signs);

}  // namespace moiety::quant::loops
