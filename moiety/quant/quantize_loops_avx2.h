// Loops of quantize_loops.h for CPUs with AVX2. Internal to moiety/quant.
#pragma once

#include "moiety/quant/quantize_loops.h"

namespace moiety::quant::loops {

// `encode` of finite bf16 elements; null without AVX2.
Encode encode_avx2(DType element, bool stochastic);

// The first blocks of `block_amax`, and how many: 0 without AVX2.
int64_t block_amax_avx2(const bf16* x, int block, int64_t blocks, uint32_t* out);

}  // namespace moiety::quant::loops
