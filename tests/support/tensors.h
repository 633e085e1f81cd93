// Tensors on the host, element by element: reading, writing, filling, copying, comparing.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/nn/element.h"
#include "tests/support/bits.h"

namespace moiety {

// The place of element i, counted row-major, of a float32, bfloat16 or float64 tensor.
inline int64_t offset_of(const TensorView& x, int64_t i) {
  if (x.contiguous()) return i;
  int64_t offset = 0;
  for (int d = x.dims() - 1; d >= 0; --d) {
    offset += i % x.size(d) * x.stride(d);
    i /= x.size(d);
  }
  return offset;
}

inline double get(const TensorView& x, int64_t i) {
  double out = 0;
  nn::with_element(x.dtype(), [&](auto e) {
    out = static_cast<double>(static_cast<const decltype(e)*>(x.raw())[offset_of(x, i)]);
  });
  return out;
}

// Element (i, j) of a matrix.
inline double get(const TensorView& x, int64_t i, int64_t j) { return get(x, i * x.size(1) + j); }

inline void put(const TensorView& x, int64_t i, double value) {
  nn::with_element(x.dtype(), [&](auto e) {
    using T = decltype(e);
    static_cast<T*>(x.raw())[offset_of(x, i)] = static_cast<T>(static_cast<nn::Compute<T>>(value));
  });
}

inline std::vector<double> values(const TensorView& x) {
  std::vector<double> out(x.numel());
  for (int64_t i = 0; i < x.numel(); ++i) out[i] = get(x, i);
  return out;
}

inline void fill(const TensorView& x, double value) {
  for (int64_t i = 0; i < x.numel(); ++i) put(x, i, value);
}

// Normal numbers times `scale` plus `shift`, rounded to x's dtype.
inline void fill_normal(const TensorView& x, uint32_t seed, double scale = 1, double shift = 0) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < x.numel(); ++i) put(x, i, shift + scale * normal(engine));
}

// Integers in [-limit, limit]: sums of products stay exact in fp32.
inline void fill_integers(const TensorView& x, uint32_t seed, int limit) {
  std::mt19937 engine(seed);
  for (int64_t i = 0; i < x.numel(); ++i) {
    put(x, i, static_cast<int>(engine() % static_cast<uint32_t>(2 * limit + 1)) - limit);
  }
}

inline Tensor normal_tensor(DType dtype, std::vector<int64_t> sizes, uint32_t seed,
                            double scale = 1, double shift = 0) {
  Tensor out(dtype, sizes);
  fill_normal(out, seed, scale, shift);
  return out;
}

inline Tensor int32_tensor(const std::vector<int32_t>& v) {
  Tensor out(DType::kInt32, {static_cast<int64_t>(v.size())});
  if (!v.empty()) std::memcpy(out.view().raw(), v.data(), v.size() * sizeof(int32_t));
  return out;
}

// x in another dtype, contiguous.
inline Tensor converted(const TensorView& x, DType dtype) {
  Tensor out(dtype, x.sizes());
  for (int64_t i = 0; i < x.numel(); ++i) put(out, i, get(x, i));
  return out;
}

// Copies between tensors without gaps, of any dtype.
inline void copy_into(const TensorView& out, const TensorView& x) {
  if (x.bytes() > 0) std::memcpy(out.raw(), x.raw(), x.bytes());
}
inline Tensor copy_of(const TensorView& x) {
  Tensor out(x.dtype(), x.sizes());
  copy_into(out, x);
  return out;
}

// Half a unit in the last place of `dtype` at x.
inline double half_ulp(DType dtype, double x) {
  const int mantissa = dtype == DType::kBFloat16 ? 7 : dtype == DType::kFloat32 ? 23 : 52;
  return x == 0 ? 0 : std::ldexp(1.0, std::ilogb(x) - mantissa - 1);
}

inline void expect_same_bits(const TensorView& a, const TensorView& b, const std::string& what) {
  ASSERT_EQ(a.numel(), b.numel()) << what;
  const int64_t each = byte_size(a.dtype(), 1);
  const auto at = [&](const TensorView& x, int64_t i) {
    return static_cast<const std::byte*>(x.raw()) + offset_of(x, i) * each;
  };
  for (int64_t i = 0; i < a.numel(); ++i) {
    ASSERT_EQ(std::memcmp(at(a, i), at(b, i), each), 0)
        << what << " element " << i << ": " << get(a, i) << " and " << get(b, i);
  }
}

// Empty if the distance of each row of `got` to that of `expected` is within `bound` times the
// latter's length. A row of one and the same value is near another such row alone.
inline std::string far_rows(const char* what, const TensorView& got, const TensorView& expected,
                            double bound) {
  const int64_t columns = got.size(-1);
  for (int64_t i = 0; i < got.numel(); i += columns) {
    double distance = 0, norm = 0;
    for (int64_t c = i; c < i + columns; ++c) {
      const double x = get(got, c), y = get(expected, c);
      distance += (x - y) * (x - y);
      norm += y * y;
    }
    if (!(distance <= bound * bound * norm)) {
      return std::string(what) + ": row " + std::to_string(i / columns) + ": " +
             std::to_string(std::sqrt(distance / norm)) + " of its length; ";
    }
  }
  return {};
}

}  // namespace moiety
