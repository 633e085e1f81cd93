// The rows that expert parallelism moves: floating point or quantized (docs/spec/ep.md#payloads).
#pragma once

#include <cstdint>
#include <variant>

#include "moiety/base/tensor_view.h"
#include "moiety/formats/quantized.h"

namespace moiety::moe {

// The parts of a row on the wire. The number is the bytes of a row of D elements:
enum class PayloadFormat : uint8_t {
  kBF16,     // 2 D
  kFP16,     // 2 D
  kFP32,     // 4 D
  kFP8E4M3,  // D + 4 ceil(D / 128): kFp8Block1x128
  kFP8E5M2,  // the same
  kMXFP8,    // D + ceil(D / 32): kMxfp8 of E4M3
  kNVFP4,    // 9 ceil(D / 16) + 4: kNvfp4, with a second-level scale for each row
};
const char* name(PayloadFormat format);

// Rows [N, D]: a TensorView of bfloat16, float16 or float32, whose rows are contiguous and may be
// strided; or a QuantizedView with rows = N, cols = D and its row direction. Codes and scales of a
// quantized row move together, bit for bit, and are never quantized anew. D is any number: a last
// block may be short.
//
// A QuantizedView that is sent has row_data and compact row_scales. In kNvfp4, tensor_scale is [N]
// if row_scaled; else it is [2], and element 0 is that of every row. Its col arrays are ignored.
//
// A QuantizedView that receives has the sender's format, element and pow2_scales, and no col
// arrays: the col operand is made from the rows that came. row_scales are compact, or in the layout
// of a GEMM (quant/scale_layout.h): kSm90MnMajor for FP8 blocks; kSm100Swizzled for kMxfp8 and
// kNvfp4, where the capacity and prepare's alignment must be multiples of 128. On a GPU that is a
// group of its own they are compact (others are Error(kUnsupported)). Pads are zero: the columns
// behind the scales of every row written, and kSm90MnMajor's rows behind the last. kNvfp4 is
// row_scaled, as rows of one expert come from ranks with different scales, and tensor_scale is [N].
// amax and flags, and tensor_scale of other formats, are left alone.
//
// Rows of row_data and of compact row_scales are contiguous and may be strided; tensor_scale may be
// strided, too. Nothing needs more alignment than its element.
using Payload = std::variant<TensorView, QuantizedView>;

}  // namespace moiety::moe
