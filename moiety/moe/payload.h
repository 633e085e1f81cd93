// The rows that expert parallelism moves: floating point or quantized (docs/spec/ep.md#payloads).
#pragma once

#include <cstdint>
#include <variant>

#include "moiety/base/tensor_view.h"
#include "moiety/formats/quantized.h"

namespace moiety::moe {

// What a row is made of on the wire. Bytes of a row of D elements:
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

// Rows [N, D]: a TensorView of bfloat16, float16 or float32, each row contiguous, rows strided as
// they like; or a QuantizedView with rows = N, cols = D and its row direction. Codes and scales of
// a quantized row move together, bit for bit, and are never quantized anew. Any D: a last block may
// be short.
//
// A QuantizedView that is sent has row_data and compact row_scales. Of kNvfp4, tensor_scale is [N]
// if row_scaled, else [2] and element 0 is that of every row. Its col arrays play no part.
//
// A QuantizedView that receives has the sender's format, element and pow2_scales, and no col
// arrays: the col operand is made of the rows that came. row_scales are compact, or in the layout
// of a GEMM (quant/scale_layout.h): kSm90MnMajor of FP8 blocks; kSm100Swizzled of kMxfp8 and
// kNvfp4, where the capacity and prepare's alignment must be multiples of 128; on a GPU compact
// alone (others: Unsupported). Pads are zero: the columns behind the scales of every row written,
// and kSm90MnMajor's rows behind the last. kNvfp4 is row_scaled, as rows of one expert come from
// ranks with different scales, and tensor_scale is [N]. amax and flags, and tensor_scale of other
// formats, are left alone.
//
// Rows of row_data and of compact row_scales are contiguous and may be strided; tensor_scale may
// be, too. Nothing needs more alignment than its element.
using Payload = std::variant<TensorView, QuantizedView>;

}  // namespace moiety::moe
