// The col operand of rows that came quantized: out := quantize(bf16(dequantize(rows))), in one call
// (docs/spec/formats.md#requantized-columns).
//
// Rows are in a format whose col codes are not those of its rows: kFp8Block1x128, kMxfp8 or kNvfp4.
// `out` has any format and asks for the col direction alone; its amax, scales, random bits and flags
// are those of quantize.
//
// The values are made tile by tile, in the caches of a CPU and the registers of a GPU: a pass over
// codes, as quantize makes one over values. With `values_MK`, bf16 [M, K], they are stored there
// first, for a caller that wants them too.
#pragma once

#include "moiety/quant/quantize.h"

namespace moiety::quant {

void requantize_col(const QuantizedView& rows, const QuantizedView& out,
                    const QuantizeOptions& options, TensorView values_MK, Stream stream);

// The same for rows that belong to groups, as quantize_grouped casts them. NVFP4 rows have a scale
// each (row_scaled). Codes of rows of no group are not read, unless `values_MK` is given, which
// receives what they stand for.
void requantize_col_grouped(const QuantizedView& rows, const RowGroups& groups,
                            const QuantizedView& out, const QuantizeOptions& options,
                            TensorView values_MK, Stream stream);

}  // namespace moiety::quant
