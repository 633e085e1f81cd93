#include "moiety/base/buffer.h"
#include "moiety/base/copy.h"
#include "moiety/base/launch.cuh"
#include "moiety/quant/convert/dequantize_device.cuh"
#include "moiety/quant/quantize/quantize_device.cuh"
#include "moiety/quant/quantize/quantize_scales.cuh"
#include "tests/quant_gpu/codecs.h"

namespace moiety::quant {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 64;

// counts[0]: how many; counts[1]: the least.
__device__ void report(uint64_t* counts, uint64_t which) {
  auto* out = reinterpret_cast<unsigned long long*>(counts);
  atomicAdd(out, 1ull);
  atomicMin(out + 1, static_cast<unsigned long long>(which));
}

template <class F>
__device__ bool same_pair(float a, float b) {
  return device::encode_pair<F>(a, b) == (F::encode(a) | uint32_t{F::encode(b)} << 8);
}

__global__ void __launch_bounds__(kThreads)
    compare_encoders(Conversion conversion, uint64_t first, uint64_t count, float one,
                     uint64_t* counts) {
  const uint64_t begin = (uint64_t{blockIdx.x} * kThreads + threadIdx.x) * kEach;
  for (uint64_t i = begin; i < begin + kEach && i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(first + i);
    const float x = __uint_as_float(bits) * one;
    // The other half of a pair is some other number.
    const float other = __uint_as_float(bits * 2654435761u) * one;
    bool same = true;
    switch (conversion) {
      case Conversion::kE4M3:
        same = same_pair<E4M3>(x, other) && same_pair<E4M3>(other, x);
        break;
      case Conversion::kE5M2:
        same = same_pair<E5M2>(x, other) && same_pair<E5M2>(other, x);
        break;
      case Conversion::kE2M1:
        same = device::encode_e2m1(x) == E2M1::encode(x);
        break;
      case Conversion::kBf16:
        same = bf16_word(x, other) == (bf16::encode(x) | uint32_t{bf16::encode(other)} << 16);
        break;
    }
    if (!same) report(counts, bits);
  }
}

__device__ bool same_value(float a, float b) {
  return __float_as_uint(canonical(a)) == __float_as_uint(canonical(b));
}

template <class C, int n>
__device__ bool same_values(const uint8_t* codes) {
  float values[n];
  constexpr int kBytes = C::kMaxCode == E2M1::kMaxCode ? n / 2 : n;
  device::ByteRun<kBytes, device::Rows::kVectors> run;
  run.load(codes, {});
  uint32_t word[decltype(run)::kWords];
  run.words(word);
  device::decode<C>(word, values);
  bool same = true;
  for (int i = 0; i < n; ++i) {
    uint8_t code = codes[i];
    if constexpr (C::kMaxCode == E2M1::kMaxCode) code = E2M1::unpack(codes[i / 2], i % 2 != 0);
    same = same && same_value(values[i], C::decode(code));
  }
  return same;
}

// Thread c: runs that begin with code c.
__global__ void __launch_bounds__(kThreads) compare_decoders(uint64_t* counts) {
  alignas(16) uint8_t codes[16];
  for (int i = 0; i < 16; ++i) codes[i] = static_cast<uint8_t>(threadIdx.x + 37 * i);
  const bool same = same_values<E4M3, 4>(codes) && same_values<E4M3, 8>(codes) &&
                    same_values<E4M3, 16>(codes) && same_values<E5M2, 4>(codes) &&
                    same_values<E5M2, 8>(codes) && same_values<E2M1, 4>(codes) &&
                    same_values<E2M1, 8>(codes) && same_values<E2M1, 16>(codes);
  if (!same) report(counts, threadIdx.x);
}

template <class F, int kBytes>
__device__ uint32_t code_of(const device::Codes& codes, int i) {
  if constexpr (kBytes == 8) return codes.word[i / 8] >> 4 * (i % 8) & 0xFu;
  return codes.word[i / 4] >> 8 * (i % 4) & 0xFFu;
}

// A unit of x sixteen times, and with it all random bytes.
template <class F, class T>
__device__ bool same_unit(float x, const device::Unit<T>& unit, float factor) {
  using device::Encoder;
  constexpr int kBytes = Encoder<F>::kBytes;
  const uint32_t amax = abs_bits(x);
  const float y = x * factor;
  bool same = true;
  for (uint32_t base = 0; base < 256; base += 16) {
    PhiloxBlock bits;
    for (uint32_t w = 0; w < 4; ++w) bits[w] = (base + 4 * w) * 0x01010101u + 0x03020100u;
    const device::Codes any = Encoder<F>::template stochastic<false>(unit, factor, amax, bits);
    const device::Codes bounded = Encoder<F>::template stochastic<true>(unit, factor, amax, bits);
    for (int i = 0; i < 16; ++i) {
      const uint32_t code = F::encode_stochastic(y, uint8_t(base + i));
      same = same && code_of<F, kBytes>(any, i) == code;
      if (fabsf(y) <= F::kMax || is_nan(factor))
        same = same && code_of<F, kBytes>(bounded, i) == code;
    }
  }
  const device::Codes nearest = Encoder<F>::nearest(unit, factor, amax);
  for (int i = 0; i < 16; ++i) same = same && code_of<F, kBytes>(nearest, i) == F::encode(y);
  return same;
}
template <class F>
__device__ bool same_units(uint32_t bits) {
  float x = __uint_as_float(bits), factor = 1;
  // A block with such an element has no scale.
  if (F::kMaxCode == E2M1::kMaxCode && !is_finite(x)) factor = kCanonicalNan;
  device::Unit<float> wide;
  for (uint32_t& word : wide.word) word = bits;
  if (!same_unit<F>(x, wide, factor)) return false;
  // The values as BF16, under a factor that is not a power of two.
  device::Unit<bf16> narrow;
  for (uint32_t& word : narrow.word) word = bits >> 16 | (bits & 0xFFFF0000u);
  x = __uint_as_float(bits & 0xFFFF0000u);
  factor = is_finite(x) || F::kMaxCode != E2M1::kMaxCode ? 1 + float(bits & 0xFFFFu) * 0x1p-16f
                                                         : kCanonicalNan;
  return same_unit<F>(x, narrow, factor);
}
__global__ void __launch_bounds__(kThreads)
    compare_units(UnitCodec codec, uint64_t first, uint64_t count, uint64_t stride,
                  uint64_t* counts) {
  const uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const auto bits = static_cast<uint32_t>(first + i * stride);
  const bool same = codec == UnitCodec::kE4M3   ? same_units<E4M3>(bits)
                    : codec == UnitCodec::kE5M2 ? same_units<E5M2>(bits)
                                                : same_units<E2M1>(bits);
  if (!same) report(counts, bits);
}

__global__ void __launch_bounds__(kThreads)
    compare_block_scales(float tensor_amax, uint64_t* counts) {
  const Nvfp4TensorScale tensor = nvfp4_tensor_scale(tensor_amax);
  const uint64_t begin = (uint64_t{blockIdx.x} * kThreads + threadIdx.x) * kEach;
  for (uint64_t bits = begin; bits < begin + kEach && bits < 0x80000000u; ++bits) {
    const float amax = __uint_as_float(static_cast<uint32_t>(bits));
    const Nvfp4BlockScale a = device::convert_block_scale(amax, tensor),
                          b = nvfp4_block_scale(amax, tensor);
    if (a.code != b.code || __float_as_uint(canonical(a.encode)) != __float_as_uint(b.encode)) {
      report(counts, bits);
    }
  }
}

__global__ void __launch_bounds__(kThreads) compare_random(uint64_t* counts) {
  const RandomStream stream = RandomStream::make(
      {0x0123456789ABCDEFu, 3 + blockIdx.x}, 7 * blockIdx.x, blockIdx.x % 5, blockIdx.x % 2 != 0);
  const device::DeviceRandom random(stream);
  const uint64_t b = (uint64_t{threadIdx.x} * 0x9E3779B97F4A7C15u) >> 17;
  const PhiloxBlock got = random.block(b), expected = stream.block(b);
  for (unsigned i = 0; i < 4; ++i) {
    if (got[i] != expected[i]) report(counts, b);
  }
}

template <class Run>
Mismatches collect(const Stream& stream, Run&& run) {
  uint64_t counts[2] = {0, ~uint64_t{0}};
  const TensorView host(counts, DType::kInt64, {2});
  const Tensor there(DType::kInt64, {2}, stream.device());
  copy(there, host, stream);
  run(static_cast<uint64_t*>(there.view().raw()));
  copy(host, there, stream);
  stream.synchronize();
  return {counts[0], counts[1]};
}

}  // namespace

Mismatches encode_mismatches(Conversion conversion, uint64_t first, uint64_t count,
                             const Stream& stream) {
  return collect(stream, [&](uint64_t* counts) {
    launch("compare_encoders", compare_encoders,
           {blocks_for(static_cast<int64_t>(count), kThreads * kEach), kThreads}, stream,
           conversion, first, count, 1.0f, counts);
  });
}

Mismatches unit_mismatches(UnitCodec codec, uint64_t first, uint64_t count, uint64_t stride,
                           const Stream& stream) {
  return collect(stream, [&](uint64_t* counts) {
    launch("compare_units", compare_units,
           {blocks_for(static_cast<int64_t>(count), kThreads), kThreads}, stream, codec, first,
           count, stride, counts);
  });
}

Mismatches block_scale_mismatches(float tensor_amax, const Stream& stream) {
  return collect(stream, [&](uint64_t* counts) {
    launch("compare_block_scales", compare_block_scales,
           {blocks_for(int64_t{1} << 31, kThreads * kEach), kThreads}, stream, tensor_amax, counts);
  });
}

Mismatches random_mismatches(const Stream& stream) {
  return collect(stream, [&](uint64_t* counts) {
    launch("compare_random", compare_random, {64, kThreads}, stream, counts);
  });
}

Mismatches decode_mismatches(const Stream& stream) {
  return collect(stream, [&](uint64_t* counts) {
    launch("compare_decoders", compare_decoders, {1, kThreads}, stream, counts);
  });
}

}  // namespace moiety::quant
