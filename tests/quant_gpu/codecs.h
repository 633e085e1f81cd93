// The conversions of the GPU against the codecs of moiety/formats, compared on the GPU.
#pragma once

#include <cstdint>

#include "moiety/base/stream.h"

namespace moiety::quant {

enum class Conversion { kE4M3, kE5M2, kE2M1, kBf16 };

struct Mismatches {
  uint64_t count;
  uint64_t first;  // bits of the first float32 that differs
};
// Of the float32 with bits first, first + 1, ..., as kernels encode them: after a product.
Mismatches encode_mismatches(Conversion conversion, uint64_t first, uint64_t count,
                             const Stream& stream);
// Of all codes of E4M3, E5M2 and E2M1, NaN alike.
Mismatches decode_mismatches(const Stream& stream);

}  // namespace moiety::quant
