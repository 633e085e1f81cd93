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
// The mismatches of the float32 with bits first, first + 1, ..., encoded as kernels do it: after a
// product.
Mismatches encode_mismatches(Conversion conversion, uint64_t first, uint64_t count,
                             const Stream& stream);
// The mismatches of units of float32 with bits first, first + stride, ..., rounded by each random
// byte; E2M1 also to nearest. The first that differs is `first` of Mismatches.
enum class UnitCodec { kE4M3, kE5M2, kE2M1 };
Mismatches unit_mismatches(UnitCodec codec, uint64_t first, uint64_t count, uint64_t stride,
                           const Stream& stream);
// The mismatches of scales of NVFP4 blocks for every amax, under a tensor's amax.
Mismatches block_scale_mismatches(float tensor_amax, const Stream& stream);
// The mismatches of random bits, for some numbers of blocks of a stream.
Mismatches random_mismatches(const Stream& stream);
// The mismatches of all codes of E4M3, E5M2 and E2M1; NaNs count as equal.
Mismatches decode_mismatches(const Stream& stream);

}  // namespace moiety::quant
