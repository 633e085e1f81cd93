// Reads of what results are added to: single elements, pairs, and lines that are brought nearer.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>
#include <type_traits>

#include "moiety/base/dtype.h"
#include "moiety/formats/octet.cuh"

namespace moiety::gemm::sm90 {

__device__ inline float read_element(const void* data, DType dtype, int64_t at) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[at];
  return low_bf16(static_cast<const uint16_t*>(data)[at]);
}

__device__ inline float2 unpacked(uint32_t pair) { return {low_bf16(pair), high_bf16(pair)}; }
__device__ inline float2 unpacked(float2 pair) { return pair; }

// Two elements of a row that begins at a multiple of 16 bytes, or the last one and zero.
__device__ inline float2 read_pair(const void* data, DType dtype, int64_t at, bool both) {
  if (!both) return {read_element(data, dtype, at), 0};
  if (dtype == DType::kFloat32) {
    return *reinterpret_cast<const float2*>(static_cast<const float*>(data) + at);
  }
  return unpacked(*reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(data) + at));
}

// The same of one dtype, float or the bits of bf16. The compiler keeps these reads in their order,
// before whatever uses them.
template <class T>
using PackedPair = std::conditional_t<std::is_same_v<T, float>, float2, uint32_t>;
template <class T>
__device__ PackedPair<T> load_pair(const T* at) {
  PackedPair<T> x;
  if constexpr (std::is_same_v<T, float>) {
    asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(at));
  } else {
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(at));
  }
  return x;
}

__device__ inline void bring_to_l2(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

}  // namespace moiety::gemm::sm90
