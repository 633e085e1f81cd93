// Scales in the layouts that block-scaled GEMMs read (docs/spec/formats.md#scale-layouts). Compact
// scales are communicated and saved; a conversion is explicit and has an inverse.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/formats/quantized.h"

namespace moiety::quant {

// The size of the scales of `view` in `direction` in a layout, as an array of R x C scales. In the
// row direction R = M, in the col direction R = K and C is the number of blocks along M. Scales of
// tile formats are expanded: a row of elements reads the scale of its tile.
//    kSm100Swizzled  uint8 [512 * ceil(R/128) * ceil(C/4)]: (r, c) at ((r/128) * ceil(C/4) + c/4) *
//                    512 + (r%32)*16 + ((r%128)/32)*4 + c%4
//    kPadded         uint8 [up(R, 128)][up(C, 4)]
//    kSm90MnMajor    float32 [C][up(R, 4)], of kFp8Block1x128 and, expanded, kFp8Block128x128
ArraySpec scale_layout_size(const QuantizedView& view, Direction direction, ScaleLayout layout);

// Writes every byte of `out`, pads with 0. Error(kUnsupported) for byte layouts of float32 scales
// and float32 layouts of byte scales.
void convert_scales(const QuantizedView& view, Direction direction, ScaleLayout layout,
                    TensorView out, Stream stream);
// The inverse for formats that are not tiles: compact scales of `view` from `scales` in `layout`.
void compact_scales(TensorView scales, ScaleLayout layout, const QuantizedView& view,
                    Direction direction, Stream stream);

// Turns FP8 block scales into those of MXFP8, ue8m0 [R][ceil(K/32)]: a power of two becomes its
// exponent byte (2^-127: 0), NaN becomes 0xFF, repeated for the four 32-blocks of 128 and over the
// rows of a tile. Any other scale becomes 0xFF and sets kFlagUnrepresentable in view.flags.
void fp8_block_to_mxfp8(const QuantizedView& view, Direction direction, TensorView out,
                        Stream stream);

}  // namespace moiety::quant
