// Col data of tile-scaled tensors, made from their row data without the original values
// (docs/spec/formats.md#transposes). A rank does this after it has gathered the row codes.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/quant/quantize.h"

namespace moiety::quant {

// Makes col_data of each item's `out` from its row_data, and amax[1] and tensor_scale[1] from index
// 0, in one launch for any number of tensors. kNvfp4Tile16: nibbles [M][K] -> [K][M], pad nibbles
// 0, any M and K. kFp8Tensor, kFp8Block128x128: bytes. kMxfp8*: nothing to do. The result is the
// col half of quantize, bit for bit. kFp8Block1x128 and kNvfp4 are Error(kUnsupported), since their
// directions are different roundings.
void transpose_quantized(const QuantizeTable& table, Stream stream);

}  // namespace moiety::quant
