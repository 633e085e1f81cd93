// Random bytes of many consecutive blocks at once, for CPU paths.
#pragma once

#include <cstdint>

#include "moiety/quant/rounding.h"

namespace moiety::quant {

// The blocks of some rows: the first one of row r is `first` + r * `step`.
struct RandomBlocks {
  uint64_t first, step;
  int64_t rows, blocks;  // blocks of a row
};

// out[r * pitch + 16 i] and the 15 bytes behind it := the bytes of block i of row r.
void random_bytes(const RandomStream& stream, const RandomBlocks& which, uint8_t* out,
                  int64_t pitch);

}  // namespace moiety::quant
