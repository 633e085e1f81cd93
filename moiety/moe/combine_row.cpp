// Sums, products and dot products of rows. Sums run over tiles that stay in the cache, up to four
// terms in one pass.
#include "moiety/moe/combine_row.h"

#include <algorithm>

#include "moiety/base/math.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp16.h"

namespace moiety::moe {
namespace {

constexpr int kTile = 1024;  // elements

template <class F>
MOIETY_INLINE void with_type(DType type, F&& f) {
  if (type == DType::kBFloat16) {
    f(bf16{});
  } else if (type == DType::kFloat16) {
    f(fp16{});
  } else {
    f(float{});
  }
}

// acc := acc (nothing if kFirst) + terms 0 .. N - 1, one after the other; weighted terms with an
// fma.
template <class T, int N, bool kFirst, bool kWeighted>
MOIETY_INLINE void add_terms(const Term* terms, int64_t d, float* __restrict acc, int n) {
  const T* x[N];
  float w[N];
  for (int j = 0; j < N; ++j) {
    x[j] = reinterpret_cast<const T*>(terms[j].row) + d;
    w[j] = terms[j].weight;
  }
  for (int i = 0; i < n; ++i) {
    float v = kFirst ? 0.0f : acc[i];
    for (int j = 0; j < N; ++j) {
      const float f = static_cast<float>(x[j][i]);
      if (kFirst && j == 0) {
        v = kWeighted ? w[j] * f : f;
      } else {
        v = kWeighted ? std::fma(w[j], f, v) : v + f;
      }
    }
    acc[i] = v;
  }
}

template <class T, bool kFirst>
MOIETY_INLINE void add_some(const Term* terms, int count, bool weighted, int64_t d, float* acc,
                            int n) {
  if (weighted) {
    add_terms<T, 1, kFirst, true>(terms, d, acc, n);
  } else if (count == 4) {
    add_terms<T, 4, kFirst, false>(terms, d, acc, n);
  } else if (count == 2) {
    add_terms<T, 2, kFirst, false>(terms, d, acc, n);
  } else {
    add_terms<T, 1, kFirst, false>(terms, d, acc, n);
  }
}

// `count` is 1, 2 or 4 terms of one dtype; 1 if weighted.
MOIETY_SIMD_CLONES
void accumulate(const Term* terms, int count, bool first, bool weighted, int64_t d, float* acc,
                int n) {
  with_type(
      terms->type, [&]<class T>(T) __attribute__((always_inline)) {
        first ? add_some<T, true>(terms, count, weighted, d, acc, n)
              : add_some<T, false>(terms, count, weighted, d, acc, n);
      });
}

MOIETY_SIMD_CLONES
void round_to(DType type, const float* __restrict acc, std::byte* out, int n) {
  with_type(
      type, [&]<class T>(T) __attribute__((always_inline)) {
        T* __restrict o = reinterpret_cast<T*>(out);
        for (int i = 0; i < n; ++i) o[i] = T(acc[i]);
      });
}

}  // namespace

void sum_terms(const Terms& terms, const std::byte* addend, DType addend_type, std::byte* out,
               DType out_type, int64_t n) {
  if (terms.count() == 0 && !addend) {
    std::memset(out, 0, n * element_bytes(out_type));
    return;
  }
  const Term last{addend, addend_type, 1};
  alignas(64) float acc[kTile];
  for (int64_t d = 0; d < n; d += kTile) {
    const int width = static_cast<int>(std::min<int64_t>(kTile, n - d));
    for (int i = 0, run = 0; i < terms.count(); i += run) {
      run = terms.run(i);
      accumulate(&terms[i], run, i == 0, terms.weighted(), d, acc, width);
    }
    if (addend) accumulate(&last, 1, terms.count() == 0, false, d, acc, width);
    round_to(out_type, acc, out + d * element_bytes(out_type), width);
  }
}

void copy_term(const Term& term, std::byte* out, DType out_type, int64_t n) {
  if (term.type == out_type) {
    std::memcpy(out, term.row, n * element_bytes(out_type));
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t x = load32(term.row + 4 * i);
    uint16_t narrow = static_cast<uint16_t>(x >> 16);
    if (out_type == DType::kFloat16) {
      const bool nan = (x & 0x7FFFFFFFu) > 0x7F800000u;  // the payload has only 10 bits
      narrow = nan ? static_cast<uint16_t>((x >> 16 & 0x8000u) | 0x7C00u | (x >> 13 & 0x3FFu))
                   : fp16(std::bit_cast<float>(x)).bits;
    }
    std::memcpy(out + 2 * i, &narrow, 2);
  }
}

void scale_row(DType type, float weight, const std::byte* x, std::byte* out, int64_t n) {
  Terms terms(true);
  terms.add({x, type, weight});
  sum_terms(terms, nullptr, type, out, type, n);
}

namespace {

// The dot product in the order of lane_sum, a group of 256 elements at a time. A lane's eight
// elements stand next to each other in the row; they are transposed, so that the lanes do.
constexpr int kLanes = 32, kGroup = 8 * kLanes;
using Eight = float __attribute__((vector_size(32)));

// to[i][l] := element i of lane l.
template <class T>
MOIETY_INLINE void load_lanes(const T* from, float (&to)[8][kLanes]) {
  alignas(64) float x[kGroup];
  for (int i = 0; i < kGroup; ++i) x[i] = static_cast<float>(from[i]);
  for (int l = 0; l < kLanes; l += 8) {
    Eight r[8], pairs[8];
    std::memcpy(r, x + 8 * l, sizeof(r));
    for (int i = 0; i < 8; i += 2) {
      pairs[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
      pairs[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i : {0, 1, 4, 5}) {
      r[i] = __builtin_shufflevector(pairs[i], pairs[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      r[i + 2] = __builtin_shufflevector(pairs[i], pairs[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int i = 0; i < 4; ++i) {
      const Eight low = __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
      const Eight high = __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
      std::memcpy(&to[i][l], &low, sizeof(low));
      std::memcpy(&to[i + 4][l], &high, sizeof(high));
    }
  }
}

}  // namespace

MOIETY_SIMD_CLONES
float dot_row(DType type, const std::byte* x, const std::byte* y, int64_t n) {
  alignas(64) float lanes[kLanes] = {};
  with_type(
      type, [&]<class T>(T) __attribute__((always_inline)) {
        const T* a = reinterpret_cast<const T*>(x);
        const T* b = reinterpret_cast<const T*>(y);
        alignas(64) float at[8][kLanes], bt[8][kLanes];
        int64_t d = 0;
        for (; d + kGroup <= n; d += kGroup) {
          load_lanes(a + d, at);
          load_lanes(b + d, bt);
          for (int i = 0; i < 8; ++i) {
            for (int l = 0; l < kLanes; ++l) lanes[l] = std::fma(at[i][l], bt[i][l], lanes[l]);
          }
        }
        for (int64_t i = d; i < n; ++i) {
          float& v = lanes[(i - d) / 8];
          v = std::fma(static_cast<float>(a[i]), static_cast<float>(b[i]), v);
        }
      });
  for (int o = kLanes / 2; o >= 1; o /= 2) {
    for (int l = 0; l < o; ++l) lanes[l] += lanes[l + o];
  }
  return lanes[0];
}

}  // namespace moiety::moe
