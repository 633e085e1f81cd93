// A checksum of a tensor's values that does not depend on how the tensor is cut:
//   D = sum over elements of mix(mix(i + 0x9E3779B97F4A7C15) + bits_i) mod 2^64
// where i is the row-major index in the logical tensor, bits_i are the element's bits,
// zero-extended, and mix is the finalizer of SplitMix64:
//   mix(z): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9;
//           z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
// Digests of boxes that tile a tensor add up to the tensor's digest.
// Golden: float32 [2, 2] {1, -2, 0.5, 3} gives f4903b68c42bd4b4.
#pragma once

#include "moiety/checkpoint/box.h"

namespace moiety::checkpoint {

// The digest of the elements of `box`, row-major at `data`, in a tensor of `shape`. Throws
// Error(kInvalidArgument) for elements of less than a byte and boxes outside of the shape.
uint64_t digest(const void* data, DType dtype, const Box& box, std::span<const int64_t> shape);

// The sum over n consecutive elements, the first of which has index `first`. element_bytes is 1, 2,
// 4 or 8.
uint64_t digest_run(const std::byte* data, int64_t element_bytes, int64_t n, uint64_t first);

}  // namespace moiety::checkpoint
