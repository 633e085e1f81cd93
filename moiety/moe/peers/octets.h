// Eight neighbouring elements of a row as floats, in steps that compute. `wide`: rows are whole
// octets at multiples of 16 bytes (octets_fit, formats/octet.cuh); else elements from `valid` on do
// not exist: they are +0, and are not stored.
#pragma once

#include <cmath>
#include <type_traits>

#include "moiety/formats/bf16.h"
#include "moiety/formats/fp16.h"
#include "moiety/moe/peers/primitives.h"

namespace moiety::moe::peers {

inline constexpr int kEight = 8;

MOIETY_STEP float to_float(float x) { return x; }
MOIETY_STEP float to_float(bf16 x) { return x; }
MOIETY_STEP float to_float(fp16 x) {
#ifdef __CUDACC__
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
  return out;
#else
  return x;
#endif
}
template <class T>
MOIETY_STEP T rounded(float x) {
#ifdef __CUDACC__
  if constexpr (sizeof(T) == 2) {
    T out;
    if constexpr (std::is_same_v<T, fp16>) {
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
    } else {
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
    }
    return out;
  }
#endif
  return T(x);
}

template <class T>
struct alignas(16) Held {
  T x[kEight];
};

template <class T>
MOIETY_STEP Held<T> load_eight(const std::byte* row, int64_t first, int64_t n, bool wide) {
  Held<T> out;
  const std::byte* from = row + first * int64_t(sizeof(T));
  if (wide) {
    Unit<16> held[sizeof(out) / 16];
    MOIETY_UNROLL
    for (int i = 0; i < int(sizeof(out) / 16); ++i) held[i] = load_unit<16>(from + 16 * i);
    memcpy(static_cast<void*>(&out), held, sizeof(out));
  } else {
    MOIETY_UNROLL
    for (int i = 0; i < kEight; ++i) {
      out.x[i] = first + i < n ? load<T>(from + i * int64_t(sizeof(T))) : T(0.0f);
    }
  }
  return out;
}
template <class T>
MOIETY_STEP void store_eight(std::byte* row, int64_t first, int64_t n, bool wide,
                             const Held<T>& x) {
  std::byte* to = row + first * int64_t(sizeof(T));
  if (wide) {
    Unit<16> held[sizeof(x) / 16];
    memcpy(held, &x, sizeof(x));
    MOIETY_UNROLL
    for (int i = 0; i < int(sizeof(x) / 16); ++i) store_unit<16>(to + 16 * i, held[i]);
  } else {
    MOIETY_UNROLL
    for (int i = 0; i < kEight; ++i) {
      if (first + i < n) store(to + i * int64_t(sizeof(T)), x.x[i]);
    }
  }
}

// The running sum of eight elements. It begins with -0, to which a first term adds up as itself, to
// the bit; without terms it is +0.
struct EightSum {
  float v[kEight] = {-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f};
  bool any = false;

  template <class T>
  MOIETY_STEP void add(const Held<T>& x) {
    MOIETY_UNROLL
    for (int i = 0; i < kEight; ++i) v[i] += to_float(x.x[i]);
    any = true;
  }
  template <class T>
  MOIETY_STEP void add_weighted(float w, const Held<T>& x) {
    MOIETY_UNROLL
    for (int i = 0; i < kEight; ++i) v[i] = fmaf(w, to_float(x.x[i]), v[i]);
    any = true;
  }
  template <class T>
  MOIETY_STEP Held<T> round() const {
    Held<T> out;
    MOIETY_UNROLL
    for (int i = 0; i < kEight; ++i) out.x[i] = rounded<T>(any ? v[i] : 0.0f);
    return out;
  }
};

// Numbers of T as they go over the wire as fp32, and one that has come back, with its bits.
template <class T>
MOIETY_STEP Held<float> widened(const Held<T>& x) {
  Held<float> out;
  MOIETY_UNROLL
  for (int i = 0; i < kEight; ++i) out.x[i] = to_float(x.x[i]);
  return out;
}
template <class T>
MOIETY_STEP T narrowed(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    uint32_t b;
    memcpy(&b, &x, 4);
    if constexpr (std::is_same_v<T, bf16>) {
      return bf16::from_bits(static_cast<uint16_t>(b >> 16));
    } else {
      const bool nan = (b & 0x7FFFFFFFu) > 0x7F800000u;  // the payload has only 10 bits
      const auto bits = static_cast<uint16_t>((b >> 16 & 0x8000u) | 0x7C00u | (b >> 13 & 0x3FFu));
      return nan ? fp16::from_bits(bits) : rounded<fp16>(x);
    }
  }
}

}  // namespace moiety::moe::peers
