// Rules that turn the words of the reduction buffer into scales, one for each kind of block, for
// host and device. The arithmetic is that of scale_math.h.
#pragma once

#include "moiety/formats/bf16.h"
#include "moiety/formats/e5m2.h"
#include "moiety/quant/partial_cast/partial_cast_plan.h"
#include "moiety/quant/scale_math.h"

namespace moiety::quant::detail {

// The parts of a rule: Word is the type that is reduced, Stored the type of the tensor's scale.
//   word(bits of an amax)   encode(word): codes = encode(RN(x * encode(word)))
//   stored(word)            finite(word): whether the block is finite

struct Fp8BlockRule {
  using Word = uint32_t;
  using Stored = float;
  float fp8_max, amax_floor;
  bool pow2;

  MOIETY_HD_INLINE constexpr Word word(uint32_t amax) const { return amax; }
  MOIETY_HD_INLINE constexpr float encode(Word w) const { return scale(w).encode; }
  MOIETY_HD_INLINE constexpr Stored stored(Word w) const { return scale(w).decode; }
  MOIETY_HD_INLINE constexpr bool finite(Word w) const { return w < 0x7F800000u; }
  MOIETY_HD_INLINE constexpr Fp8Scale scale(Word w) const {
    return fp8_scale(std::bit_cast<float>(w), fp8_max, amax_floor, pow2);
  }
};

struct Mxfp8Rule {
  using Word = uint8_t;
  using Stored = uint8_t;
  bool e5m2;

  MOIETY_HD_INLINE constexpr Word word(uint32_t amax) const {
    const float a = std::bit_cast<float>(amax);
    return e5m2 ? mxfp8_scale<E5M2>(a) : mxfp8_scale<E4M3>(a);
  }
  MOIETY_HD_INLINE constexpr float encode(Word w) const { return UE8M0::inverse(w); }
  MOIETY_HD_INLINE constexpr Stored stored(Word w) const { return w; }
  MOIETY_HD_INLINE constexpr bool finite(Word w) const { return w != UE8M0::kNan; }
};

struct Nvfp4Rule {
  using Word = uint32_t;
  using Stored = uint8_t;
  Nvfp4TensorScale tensor;

  MOIETY_HD_INLINE constexpr Word word(uint32_t amax) const { return amax; }
  MOIETY_HD_INLINE constexpr float encode(Word w) const { return scale(w).encode; }
  MOIETY_HD_INLINE constexpr Stored stored(Word w) const { return scale(w).code; }
  MOIETY_HD_INLINE constexpr bool finite(Word w) const { return w < 0x7F800000u; }
  MOIETY_HD_INLINE constexpr Nvfp4BlockScale scale(Word w) const {
    return nvfp4_block_scale(std::bit_cast<float>(w), tensor);
  }
};

// The reduced amax of a tensor-scaled item.
MOIETY_HD_INLINE float tensor_amax(const PartialItem& item, const std::byte* reduction) {
  return *reinterpret_cast<const float*>(reduction + item.tensor_word);
}

// kFp8Tensor: the one scale of all codes.
MOIETY_HD_INLINE Fp8Scale fp8_tensor_scale(const PartialItem& item, const PartialArrays& arrays,
                                           const std::byte* reduction) {
  if (item.delayed) return {*arrays.delayed_scale, *arrays.delayed_scale_inv};
  return fp8_scale(tensor_amax(item, reduction), fp8_max_of(item.spec.element),
                   item.spec.amax_floor, item.spec.pow2_scales);
}

// The value that is stored as tensor_scale.
MOIETY_HD_INLINE float tensor_decode_scale(const PartialItem& item, const PartialArrays& arrays,
                                           const std::byte* reduction) {
  if (item.spec.format == Format::kFp8Tensor) {
    return fp8_tensor_scale(item, arrays, reduction).decode;
  }
  return is_fp4(item.spec.format) ? nvfp4_tensor_scale(tensor_amax(item, reduction)).decode : 1.0f;
}

// Calls body(rule) with the rule of the item's blocks; for items that have blocks. If the rule is
// to make scales of NVFP4, `reduction` must hold the final amax of the tensor.
template <class Body>
MOIETY_HD_INLINE void with_rule(const PartialItem& item, const std::byte* reduction, Body&& body) {
  const QuantSpec& spec = item.spec;
  if (is_mxfp8(spec.format)) {
    body(Mxfp8Rule{spec.element == DType::kE5M2});
  } else if (is_fp4(spec.format)) {
    body(Nvfp4Rule{nvfp4_tensor_scale(tensor_amax(item, reduction))});
  } else {
    body(Fp8BlockRule{fp8_max_of(spec.element), spec.amax_floor, spec.pow2_scales});
  }
}

// An amax as it is after through_bf16; rounding is monotone, so it may come after the maximum.
MOIETY_HD_INLINE constexpr uint32_t rounded_amax(uint32_t amax, bool through_bf16) {
  const auto rounded = static_cast<uint32_t>(bf16::encode(std::bit_cast<float>(amax))) << 16;
  return through_bf16 ? rounded : amax;
}

}  // namespace moiety::quant::detail
