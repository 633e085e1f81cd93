// Scales of blocks and tensors for the kernels, with the arithmetic of scale_math.h.
#pragma once

#include "moiety/quant/convert/dequantize_device.cuh"
#include "moiety/quant/quantize/quantize_device.cuh"
#include "moiety/quant/quantize/quantize_job.h"
#include "moiety/quant/scale_math.h"

namespace moiety::quant::device {

// nvfp4_block_scale with the hardware's conversions.
__device__ inline Nvfp4BlockScale convert_block_scale(float amax, const Nvfp4TensorScale& tensor) {
  const float d = __fmaf_rn(amax, 0.0f, amax * tensor.block);  // NaN if the amax is infinite
  const uint32_t code = encode_pair<E4M3>(d, 0.0f);
  const float inverse = 1.0f / (decode_pair<E4M3>(code).x * tensor.decode);
  float encode;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(encode) : "f"(inverse), "f"(kMaxFloat));
  return {uint8_t(code), encode};
}

// fp8_scale with powers of two and no floor, without a division. FP8's maxima are 1.75 times a
// power, so the quotient's exponent is one less where the mantissa of amax is above 1.75; no such
// quotient rounds up to a power.
__device__ inline Fp8Scale power_scale(float amax, DType element) {
  static_assert(E4M3::kMax == 1.75f * 0x1p8f && E5M2::kMax == 1.75f * 0x1p15f);
  const uint32_t a = __float_as_uint(amax);
  const int top = 2 * 127 + (element == DType::kE5M2 ? 15 : 8);
  int exponent = min(top - int(a + 0x1FFFFFu >> 23), 254);  // exponent of the largest finite power
  if (a == 0) exponent = 127;
  if (!is_finite(amax)) return {kCanonicalNan, kCanonicalNan};
  const uint32_t inverse = exponent == 254 ? 0x00400000u : uint32_t(254 - exponent) << 23;
  return {__uint_as_float(uint32_t(exponent) << 23), __uint_as_float(inverse)};
}

// The factors, besides their amax, that scales of blocks depend on.
template <Format F>
struct TensorFactors {
  Nvfp4TensorScale nvfp4;
  float fp8;  // kFp8Tensor: the factor of the values

  // `direction` is 0 for row, 1 for col.
  static __device__ TensorFactors of(const QuantizeJob& job, int direction) {
    TensorFactors out{};
    if constexpr (is_fp4(F))
      out.nvfp4 = nvfp4_tensor_scale(*job.amax[job.amax_index(Direction(direction))]);
    if constexpr (F == Format::kFp8Tensor) {
      out.fp8 = job.delayed_scale ? *job.delayed_scale : scale(job, direction).encode;
    }
    return out;
  }
  // The stored decode scale.
  static __device__ float decode(const QuantizeJob& job, int direction) {
    if constexpr (is_fp4(F)) {
      return nvfp4_tensor_scale(*job.amax[job.amax_index(Direction(direction))]).decode;
    } else if constexpr (F == Format::kFp8Tensor) {
      return job.delayed_scale ? *job.delayed_scale_inv : scale(job, direction).decode;
    } else {
      return 1.0f;
    }
  }

 private:
  static __device__ Fp8Scale scale(const QuantizeJob& job, int direction) {
    return fp8_scale(*job.amax[job.amax_index(Direction(direction))], fp8_max_of(job.spec.element),
                     job.spec.amax_floor, job.spec.pow2_scales);
  }
};

// The stored scale of a block, and the factor of its values.
template <Format F>
struct BlockFactor {
  uint32_t stored;  // a byte, or the bits of a float32
  float encode;

  static __device__ BlockFactor of(const QuantizeJob& job, const TensorFactors<F>& tensor,
                                   uint32_t amax_bits) {
    const float amax = __uint_as_float(amax_bits);
    if constexpr (F == Format::kFp8Tensor) {
      return {0, tensor.fp8};
    } else if constexpr (is_fp8_block(F)) {
      const QuantSpec& spec = job.spec;
      const Fp8Scale s =
          spec.pow2_scales && !(spec.amax_floor > 0)
              ? power_scale(amax, spec.element)
              : fp8_scale(amax, fp8_max_of(spec.element), spec.amax_floor, spec.pow2_scales);
      return {__float_as_uint(s.decode), s.encode};
    } else if constexpr (is_mxfp8(F)) {
      const uint8_t e =
          job.spec.element == DType::kE5M2 ? mxfp8_scale<E5M2>(amax) : mxfp8_scale<E4M3>(amax);
      return {e, UE8M0::inverse(e)};
    } else {
      const Nvfp4BlockScale s = convert_block_scale(amax, tensor.nvfp4);
      return {s.code, s.encode};
    }
  }
  __device__ void store(void* scales, int64_t i) const {
    if constexpr (is_fp8_block(F)) {
      static_cast<float*>(scales)[i] = __uint_as_float(stored);
    } else if constexpr (F != Format::kFp8Tensor) {
      static_cast<uint8_t*>(scales)[i] = uint8_t(stored);
    }
  }
};

// Writes the scalars of a job when the amax is known (with delayed scaling all but the amax). One
// thread calls it.
template <Format F>
__device__ void write_scalars(const QuantizeJob& job) {
  bool finite = true;
  for (int i = 0; i < 2; ++i) {
    if (!(i == 0 ? job.want_row : job.want_col)) continue;
    if (job.tensor_scale[i]) *job.tensor_scale[i] = TensorFactors<F>::decode(job, i);
    if (!is_tensor_scaled(F) || job.delayed_scale) continue;
    const float amax = *job.amax[job.amax_index(Direction(i))];
    finite = finite && is_finite(amax);
    *job.amax[i] = amax;
  }
  if (!finite && job.flags) atomicOr(job.flags, kFlagNonFinite);
}

// Makes the slot the larger of itself and `bits`. Mostly it is that already, and a look is cheaper
// than an atomic operation on a word that all blocks want.
__device__ inline void raise(float* slot, uint32_t bits) {
  auto* word = reinterpret_cast<uint32_t*>(slot);
  if (bits > __ldcg(word)) atomicMax(word, bits);
}

// Reports the largest magnitude that a warp met; all lanes call it.
template <Format F>
__device__ void report_amax(const QuantizeJob& job, uint32_t bits) {
  if (F == Format::kFp8Tensor && job.delayed_scale) {
    const uint32_t all = lane_max<31>(bits);
    if (threadIdx.x % 32 == 0) {
      if (job.want_row && job.amax[0]) raise(job.amax[0], all);
      if (job.want_col && job.amax[1]) raise(job.amax[1], all);
      raise(job.step_amax, all);
    }
  }
  if (job.flags && !is_finite(__uint_as_float(bits))) atomicOr(job.flags, kFlagNonFinite);
}

template <class Body>
__device__ void with_codec(const QuantSpec& spec, Body&& body) {
  if (spec.element == DType::kE5M2) {
    body(E5M2{});
  } else {
    body(E4M3{});
  }
}
template <Format F, class Body>
__device__ void with_codec_of(const QuantSpec& spec, Body&& body) {
  if constexpr (is_fp4(F)) {
    body(E2M1{});
  } else {
    with_codec(spec, body);
  }
}

// The source of random bits, which all lanes of a warp ask for, and the bits of a block of sixteen
// elements.
template <bool kStochastic>
__device__ DeviceRandom device_random(const QuantizeJob& job, Direction direction) {
  if constexpr (kStochastic) return DeviceRandom(job.random_stream(direction));
  return {};
}
template <bool kStochastic>
__device__ PhiloxBlock random_bits(const DeviceRandom& random, uint64_t block) {
  if constexpr (kStochastic) return random.block(block);
  return {};
}

// The codes of a unit. `amax` is the bits of a magnitude that no element exceeds; it is ignored
// where all of the tensor has one scale.
template <Format F, class C, bool kStochastic, class T>
__device__ Codes encode_unit(const Unit<T>& x, float factor, uint32_t amax,
                             const PhiloxBlock& random) {
  constexpr bool kBounded = F != Format::kFp8Tensor;  // the scale is that of the amax
  if constexpr (kStochastic) {
    return Encoder<C>::template stochastic<kBounded>(x, factor, amax, random);
  } else {
    return Encoder<C>::nearest(x, factor, amax);
  }
}

}  // namespace moiety::quant::device
