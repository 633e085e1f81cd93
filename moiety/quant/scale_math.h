// Scale arithmetic of all quantized formats: from the largest magnitude (amax) of a tensor or block
// to its scale. The scalar reference, the vectorized CPU paths and the kernels call these
// functions; there is no other copy. Each operation is one FP32 operation rounded to nearest even
// with gradual underflow, divisions too; the order is part of the definition.
//
// An amax is the unsigned maximum of `abs_bits`, so a NaN or an infinity shows. A scale of a
// non-finite amax is NaN, and so is every code under it.
#pragma once

#include "moiety/base/dtype.h"
#include "moiety/formats/e2m1.h"
#include "moiety/formats/e4m3.h"
#include "moiety/formats/e5m2.h"
#include "moiety/formats/ue8m0.h"

namespace moiety::quant {

// The largest value of FP8 codes.
MOIETY_HD_INLINE constexpr float fp8_max_of(DType element) {
  return element == DType::kE5M2 ? E5M2::kMax : E4M3::kMax;
}

// RN(numerator / denominator), at most the largest finite value; both are finite and not negative.
MOIETY_HD_INLINE constexpr float capped_quotient(float numerator, float denominator) {
  const float q = numerator / denominator;
  return q < kMaxFloat ? q : kMaxFloat;
}

// FP8: an FP32 scale per tensor, per 1x128 block or per 128x128 block.
struct Fp8Scale {
  float encode;  // code = encode(RN(x * encode))
  float decode;  // stored scale: RN(1 / encode)
};

// The scales of an encode scale that is given, as in delayed scaling.
MOIETY_HD_INLINE constexpr Fp8Scale fp8_scale_of(float encode) {
  return {encode, canonical(1.0f / encode)};
}

// pow2 rounds the scale down to a power of two. An amax below amax_floor counts as amax_floor.
MOIETY_HD_INLINE constexpr Fp8Scale fp8_scale(float amax, float fp8_max, float amax_floor,
                                              bool pow2) {
  const float a = amax < amax_floor ? amax_floor : amax;
  const float exact = a == 0 ? 1.0f : capped_quotient(fp8_max, a);
  const float cut = std::bit_cast<float>(std::bit_cast<uint32_t>(exact) & 0xFF800000u);
  return fp8_scale_of(is_finite(amax) ? (pow2 ? cut : exact) : kCanonicalNan);
}

// MXFP8 (1x32 blocks, 32x32 tiles), where F is the element codec: the scale byte e, non-decreasing
// in amax; code = F::encode(RN(x * UE8M0::inverse(e))).
template <class F>
MOIETY_HD_INLINE constexpr uint8_t mxfp8_scale(float amax) {
  constexpr float kInverseMax = 1.0f / F::kMax;
  const uint8_t e = UE8M0::encode_up(amax * kInverseMax);
  return is_finite(amax) ? e : UE8M0::kNan;
}

// NVFP4: one FP32 scale per tensor (or per row), one E4M3 scale per block. A code's value is (code
// * block scale) * decode.
struct Nvfp4TensorScale {
  float encode;  // S = RN(2688 / amax)
  float block;   // RN(S * RN(1 / 6)); a block's scale is this times its amax
  float decode;  // g = RN(1 / S), the stored tensor scale
};

MOIETY_HD_INLINE constexpr Nvfp4TensorScale nvfp4_tensor_scale(float amax) {
  constexpr float kSixth = 1.0f / 6.0f;
  if (!is_finite(amax)) return {kCanonicalNan, kCanonicalNan, kCanonicalNan};
  const float s = amax == 0 ? 1.0f : capped_quotient(E4M3::kMax * E2M1::kMax, amax);
  return {s, s * kSixth, 1.0f / s};
}

struct Nvfp4BlockScale {
  uint8_t code;  // E4M3
  float encode;  // code of x is E2M1 encode(RN(x * encode)); NaN gives the code 0x7
};

MOIETY_HD_INLINE constexpr Nvfp4BlockScale nvfp4_block_scale(float amax,
                                                             const Nvfp4TensorScale& tensor) {
  const float product = amax * tensor.block;
  const float d = product < kMaxFloat ? product : kMaxFloat;
  const auto code = static_cast<uint8_t>(E4M3::encode_magnitude(d));
  const float encode = capped_quotient(1.0f, E4M3::decode(code) * tensor.decode);
  const bool finite = is_finite(amax) && is_finite(tensor.encode);
  return {finite ? code : E4M3::kNan, finite ? encode : kCanonicalNan};
}

}  // namespace moiety::quant
