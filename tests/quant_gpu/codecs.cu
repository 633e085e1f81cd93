#include "moiety/base/buffer.h"
#include "moiety/base/copy.h"
#include "moiety/base/launch.cuh"
#include "moiety/quant/dequantize_device.cuh"
#include "moiety/quant/quantize_device.cuh"
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
        same =
            device::bf16_pair(x, other) == (bf16::encode(x) | uint32_t{bf16::encode(other)} << 16);
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
  device::CodeRun<C, n> run;
  run.load(codes, n);
  run.decode(values);
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

Mismatches decode_mismatches(const Stream& stream) {
  return collect(stream, [&](uint64_t* counts) {
    launch("compare_decoders", compare_decoders, {1, kThreads}, stream, counts);
  });
}

}  // namespace moiety::quant
