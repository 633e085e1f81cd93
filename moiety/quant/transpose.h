// Col data of tile-scaled tensors from their row data, without the values they came from
// (docs/spec/formats.md#transposes): what a rank does after it has gathered the row codes.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/quant/quantize.h"

namespace moiety::quant {

// One launch for any number of tensors: col_data of each item's `out` from its row_data, and
// amax[1], tensor_scale[1] from index 0. kNvfp4Tile16: nibbles [M][K] -> [K][M], pad nibbles 0, any
// M and K; kFp8Tensor, kFp8Block128x128: bytes; kMxfp8*: nothing to do. The result is the col half
// of quantize, bit for bit. kFp8Block1x128 and kNvfp4: Unsupported, their directions are different
// roundings.
void transpose_quantized(const QuantizeTable& table, Stream stream);

}  // namespace moiety::quant
