// Eight neighbouring elements of a row as floats, in steps that compute. `wide`: rows are whole
// octets at multiples of 16 bytes (octets_fit, formats/octet.cuh); else elements from `valid` on do
// not exist: they are +0, and are not stored.
#pragma once

#include <cmath>
#include <type_traits>

#include "moiety/formats/bf16.h"
#include "moiety/formats/fp16.h"
#include "moiety/moe/peers/primitives.h"
#ifdef __CUDACC__
#include "moiety/formats/octet.cuh"
#endif

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
MOIETY_STEP fp16 rounded_fp16(float x) {
#ifdef __CUDACC__
  fp16 out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
  return out;
#else
  return fp16(x);
#endif
}

// Their bits, in words, so that what is loaded stays in the registers that it came in until it is
// used: loads that are taken apart at once would wait one after the other.
template <class T>
struct alignas(16) Held {
  static constexpr int kWords = kEight * int(sizeof(T)) / 4;
  uint32_t word[kWords];
};

MOIETY_STEP float as_float(uint32_t bits) {
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
MOIETY_STEP uint32_t bits_of(float x) {
  uint32_t out;
  memcpy(&out, &x, 4);
  return out;
}
MOIETY_STEP uint32_t bits_of(bf16 x) { return x.bits; }
MOIETY_STEP uint32_t bits_of(fp16 x) { return x.bits; }

template <class T>
MOIETY_STEP float element(const Held<T>& x, int i) {
  if constexpr (sizeof(T) == 4) {
    return as_float(x.word[i]);
  } else {
    const uint32_t two = x.word[i / 2];
    if constexpr (std::is_same_v<T, bf16>) return as_float(i % 2 == 0 ? two << 16 : two & ~0xFFFFu);
    return to_float(T::from_bits(static_cast<uint16_t>(i % 2 == 0 ? two : two >> 16)));
  }
}
// Of elements f(i).
template <class T, class F>
MOIETY_STEP Held<T> held_of(F&& f) {
  Held<T> out;
  MOIETY_UNROLL
  for (int i = 0; i < Held<T>::kWords; ++i) {
    if constexpr (sizeof(T) == 4) {
      out.word[i] = bits_of(f(i));
    } else {
      out.word[i] = bits_of(f(2 * i)) | bits_of(f(2 * i + 1)) << 16;
    }
  }
  return out;
}
// The values f(i), rounded.
template <class T, class F>
MOIETY_STEP Held<T> rounded_eight(F&& f) {
#ifdef __CUDACC__
  if constexpr (sizeof(T) == 2) {
    Held<T> out;
    MOIETY_UNROLL
    for (int i = 0; i < Held<T>::kWords; ++i) {
      const float second = f(2 * i + 1), first = f(2 * i);
      out.word[i] = std::is_same_v<T, fp16> ? fp16_word(first, second) : bf16_word(first, second);
    }
    return out;
  }
#endif
  return held_of<T>([&](int i) { return T(f(i)); });
}

template <class T>
MOIETY_STEP Held<T> load_eight(const std::byte* row, int64_t first, int64_t n, bool wide) {
  const std::byte* from = row + first * int64_t(sizeof(T));
  if (!wide) {
    return held_of<T>(
        [&](int i) { return first + i < n ? load<T>(from + i * int64_t(sizeof(T))) : T(0.0f); });
  }
  Held<T> out;
#ifdef __CUDACC__
  MOIETY_UNROLL
  for (int i = 0; i < Held<T>::kWords / 4; ++i) {
    const uint4 four = reinterpret_cast<const uint4*>(from)[i];
    out.word[4 * i] = four.x;
    out.word[4 * i + 1] = four.y;
    out.word[4 * i + 2] = four.z;
    out.word[4 * i + 3] = four.w;
  }
#else
  std::memcpy(out.word, from, sizeof(out));
#endif
  return out;
}
template <class T>
MOIETY_STEP void store_eight(std::byte* row, int64_t first, int64_t n, bool wide,
                             const Held<T>& x) {
  std::byte* to = row + first * int64_t(sizeof(T));
  if (!wide) {
    MOIETY_UNROLL
    for (int i = 0; i < kEight; ++i) {
      if (first + i >= n) continue;
      if constexpr (sizeof(T) == 4) {
        store(to + 4 * i, x.word[i]);
      } else {
        const uint32_t two = x.word[i / 2];
        store(to + 2 * i, static_cast<uint16_t>(i % 2 == 0 ? two : two >> 16));
      }
    }
    return;
  }
#ifdef __CUDACC__
  MOIETY_UNROLL
  for (int i = 0; i < Held<T>::kWords / 4; ++i) {
    reinterpret_cast<uint4*>(to)[i] =
        make_uint4(x.word[4 * i], x.word[4 * i + 1], x.word[4 * i + 2], x.word[4 * i + 3]);
  }
#else
  std::memcpy(to, x.word, sizeof(x));
#endif
}

// The running sum of eight elements. It begins with -0, to which a first term adds up as itself, to
// the bit; without terms it is +0.
struct EightSum {
  float v[kEight] = {-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f};
  bool any = false;

  template <class T>
  MOIETY_STEP void add(const Held<T>& x) {
    MOIETY_UNROLL
    for (int i = 0; i < kEight; ++i) v[i] += element(x, i);
    any = true;
  }
  // With a weight of 1 as add.
  template <class T>
  MOIETY_STEP void add_weighted(float w, const Held<T>& x) {
    MOIETY_UNROLL
    for (int i = 0; i < kEight; ++i) v[i] = fmaf(w, element(x, i), v[i]);
    any = true;
  }
  template <class T>
  MOIETY_STEP Held<T> round() const {
    return rounded_eight<T>([&](int i) { return any ? v[i] : 0.0f; });
  }
};

// Numbers of T as they go over the wire as fp32, and one that has come back, with its bits.
template <class T>
MOIETY_STEP Held<float> widened(const Held<T>& x) {
  return held_of<float>([&](int i) { return element(x, i); });
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
      return nan ? fp16::from_bits(bits) : rounded_fp16(x);
    }
  }
}

}  // namespace moiety::moe::peers
