// Scales in the layouts that block-scaled GEMMs read (docs/spec/formats.md#scale-layouts). Compact
// scales are what is communicated and saved; a conversion is explicit and has an inverse.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/formats/quantized.h"

namespace moiety::quant {

// Of the scales of `view` in `direction`, an array of R x C scales: row R = M; col R = K, C the
// blocks along M. Scales of tile formats are expanded: an element row reads that of its tile.
//   kSm100Swizzled  uint8 [512 * ceil(R/128) * ceil(C/4)]: (r, c) at ((r/128) * ceil(C/4) + c/4) *
//                   512 + (r%32)*16 + ((r%128)/32)*4 + c%4
//   kPadded         uint8 [up(R, 128)][up(C, 4)]
//   kSm90MnMajor    float32 [C][up(R, 4)], of kFp8Block1x128 and, expanded, kFp8Block128x128
ArraySpec scale_layout_size(const QuantizedView& view, Direction direction, ScaleLayout layout);

// Writes every byte of `out`, pads with 0. Byte layouts of float32 scales and float32 layouts of
// byte scales: Unsupported.
void convert_scales(const QuantizedView& view, Direction direction, ScaleLayout layout,
                    TensorView out, Stream stream);
// The inverse for formats that are not tiles: compact scales of `view` from `scales` in `layout`.
void compact_scales(TensorView scales, ScaleLayout layout, const QuantizedView& view,
                    Direction direction, Stream stream);

// FP8 block scales as those of MXFP8: a power of two becomes its exponent byte (2^-127: 0), NaN
// 0xFF, repeated for the four 32-blocks of 128 and over the rows of a tile: ue8m0 [R][ceil(K/32)].
// Any other scale becomes 0xFF and sets kFlagUnrepresentable in view.flags.
void fp8_block_to_mxfp8(const QuantizedView& view, Direction direction, TensorView out,
                        Stream stream);

}  // namespace moiety::quant
