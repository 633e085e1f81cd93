// Eight neighbouring elements of a row (float, bf16 or fp16) in a thread's registers. Kernels that
// go over rows load octets, compute on them in fp32, round and store.
//
// With kVector, rows are whole octets at multiples of 16 bytes (`octets_fit`). Without it elements
// are moved one by one: `valid` says how many of the eight exist (it may be <= 0), and the others
// are +0.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "moiety/base/tensor_view.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp16.h"

namespace moiety {

constexpr int kOctet = 8;

// The two bf16 of a word.
__device__ inline float low_bf16(uint32_t word) { return __uint_as_float(word << 16); }
__device__ inline float high_bf16(uint32_t word) { return __uint_as_float(word & 0xFFFF0000u); }

template <class T>
struct Octet {
  static constexpr int kWords = kOctet * int(sizeof(T)) / 4;
  uint32_t word[kWords] = {};

  __device__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word[i]);
    } else if constexpr (std::is_same_v<T, fp16>) {
      float out;
      asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(uint16_t(word[i / 2] >> 16 * (i % 2))));
      return out;
    } else {
      return i % 2 ? high_bf16(word[i / 2]) : low_bf16(word[i / 2]);
    }
  }
  // Bits of the largest magnitude among the first `valid` elements: NaN > inf > finite.
  __device__ uint32_t amax(int64_t valid) const {
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (i < valid) m = max(m, __float_as_uint((*this)[i]) & 0x7FFFFFFFu);
    }
    return m;
  }
};

// Two bf16 in a word, the first in its low half; the same bits as bf16(float): rounded to nearest
// even, subnormals kept, NaN 0x7FFF.
__device__ inline uint32_t bf16_word(float first, float second) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
  return out;
}

// Two fp16 in a word, the first in its low half.
__device__ inline uint32_t fp16_word(float first, float second) {
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
  return out;
}

template <class T>
__device__ Octet<T> round_octet(const float (&v)[kOctet]) {
  Octet<T> out;
#pragma unroll
  for (int w = 0; w < Octet<T>::kWords; ++w) {
    if constexpr (sizeof(T) == 4) {
      out.word[w] = __float_as_uint(v[w]);
    } else if constexpr (std::is_same_v<T, fp16>) {
      out.word[w] = fp16_word(v[2 * w], v[2 * w + 1]);
    } else {
      out.word[w] = bf16_word(v[2 * w], v[2 * w + 1]);
    }
  }
  return out;
}

template <bool kVector, class T>
__device__ Octet<T> load_octet(const T* p, int64_t valid) {
  Octet<T> out;
  if constexpr (kVector) {
    if (valid <= 0) return out;
#pragma unroll
    for (int w = 0; w < Octet<T>::kWords; w += 4) {
      const uint4 v = reinterpret_cast<const uint4*>(p)[w / 4];
      out.word[w] = v.x;
      out.word[w + 1] = v.y;
      out.word[w + 2] = v.z;
      out.word[w + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (i >= valid) continue;
      if constexpr (sizeof(T) == 4) {
        out.word[i] = reinterpret_cast<const uint32_t*>(p)[i];
      } else {
        out.word[i / 2] |= uint32_t{reinterpret_cast<const uint16_t*>(p)[i]} << 16 * (i % 2);
      }
    }
  }
  return out;
}

template <bool kVector, class T>
__device__ void store_octet(T* p, const Octet<T>& x, int64_t valid) {
  if constexpr (kVector) {
    if (valid <= 0) return;
#pragma unroll
    for (int w = 0; w < Octet<T>::kWords; w += 4) {
      reinterpret_cast<uint4*>(p)[w / 4] =
          make_uint4(x.word[w], x.word[w + 1], x.word[w + 2], x.word[w + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (i >= valid) continue;
      if constexpr (sizeof(T) == 4) {
        reinterpret_cast<uint32_t*>(p)[i] = x.word[i];
      } else {
        reinterpret_cast<uint16_t*>(p)[i] = uint16_t(x.word[i / 2] >> 16 * (i % 2));
      }
    }
  }
}

// The same in global memory, always by instructions of 16 bytes: the compiler splits store_octet's
// if the words come from different branches, and a warp's stores then take four times as long.
template <bool kVector, class T>
__device__ void store_octet_global(T* p, const Octet<T>& x, int64_t valid) {
  if constexpr (kVector) {
    if (valid <= 0) return;
#pragma unroll
    for (int w = 0; w < Octet<T>::kWords; w += 4) {
      asm volatile(
          "st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(reinterpret_cast<uint32_t*>(p) + w),
          "r"(x.word[w]), "r"(x.word[w + 1]), "r"(x.word[w + 2]), "r"(x.word[w + 3])
          : "memory");
    }
  } else {
    store_octet<false>(p, x, valid);
  }
}

// Whether all rows of the tensors that are defined are whole octets at multiples of 16 bytes.
inline bool octets_fit(std::initializer_list<const TensorView*> tensors) {
  for (const TensorView* x : tensors) {
    if (!x->defined()) continue;
    if (x->size(-1) % kOctet != 0 || reinterpret_cast<uintptr_t>(x->raw()) % 16 != 0) return false;
    for (int d = 0; d + 1 < x->dims(); ++d) {
      if (x->size(d) > 1 && byte_size(x->dtype(), x->stride(d)) % 16 != 0) return false;
    }
  }
  return true;
}

}  // namespace moiety
