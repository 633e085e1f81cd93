// The bytes of many consecutive blocks at once, for CPU paths.
#pragma once

#include <cstdint>

#include "moiety/quant/rounding.h"

namespace moiety::quant {

// out[16 i] to out[16 i + 15] = the bytes of stream.block(first_block + i), i < blocks.
void random_bytes(const RandomStream& stream, uint64_t first_block, int64_t blocks, uint8_t* out);

}  // namespace moiety::quant
