// What the tests of the model share: random tensors, copies between dtypes, central differences.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/nn/element.h"
#include "moiety/nn/rows.h"

namespace moiety::model {

// Element i, counted row-major, of a view whose rows are contiguous.
inline void* element_address(const TensorView& x, int64_t i) {
  int64_t offset = 0;
  for (int d = x.dims() - 1; d >= 0; --d) {
    offset += i % x.size(d) * x.stride(d);
    i /= x.size(d);
  }
  return static_cast<std::byte*>(x.raw()) + byte_size(x.dtype(), offset);
}

inline double get(const TensorView& x, int64_t i) {
  double out = 0;
  nn::with_element(x.dtype(), [&](auto e) {
    out = static_cast<double>(*static_cast<decltype(e)*>(element_address(x, i)));
  });
  return out;
}

inline void set(const TensorView& x, int64_t i, double value) {
  nn::with_element(x.dtype(), [&](auto e) {
    using T = decltype(e);
    *static_cast<T*>(element_address(x, i)) = static_cast<T>(static_cast<nn::Compute<T>>(value));
  });
}

inline std::vector<double> values(const TensorView& x) {
  std::vector<double> out(x.numel());
  for (int64_t i = 0; i < x.numel(); ++i) out[i] = get(x, i);
  return out;
}

// Normal numbers times `scale` plus `shift`, rounded to x's dtype.
inline void fill_normal(const TensorView& x, unsigned seed, double scale = 1, double shift = 0) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < x.numel(); ++i) set(x, i, shift + scale * normal(engine));
}

inline Tensor normal_tensor(DType dtype, std::vector<int64_t> sizes, unsigned seed,
                            double scale = 1, double shift = 0) {
  Tensor out(dtype, sizes);
  fill_normal(out, seed, scale, shift);
  return out;
}

// x in another dtype, contiguous.
inline Tensor converted(const TensorView& x, DType dtype) {
  Tensor out(dtype, x.sizes());
  for (int64_t i = 0; i < x.numel(); ++i) set(out, i, get(x, i));
  return out;
}

inline Tensor int32_tensor(const std::vector<int32_t>& v) {
  Tensor out(DType::kInt32, {static_cast<int64_t>(v.size())});
  if (!v.empty()) std::memcpy(out.view().raw(), v.data(), v.size() * sizeof(int32_t));
  return out;
}

inline void expect_same_bits(const TensorView& a, const TensorView& b, const std::string& what) {
  ASSERT_EQ(a.numel(), b.numel()) << what;
  const int64_t bytes = byte_size(a.dtype(), 1);
  for (int64_t i = 0; i < a.numel(); ++i) {
    ASSERT_EQ(std::memcmp(element_address(a, i), element_address(b, i), bytes), 0)
        << what << " element " << i << ": " << get(a, i) << " and " << get(b, i);
  }
}

// Half a unit in the last place of the dtype, at x.
inline double half_ulp(DType dtype, double x) {
  const int digits = dtype == DType::kBFloat16 ? 8 : dtype == DType::kFloat32 ? 24 : 53;
  return std::ldexp(std::max(std::abs(x), 1e-30), -digits);
}

// Compares `dx`, the gradient of loss() with respect to the float64 tensor `x`, with central
// differences at up to `samples` elements.
inline void expect_gradient(const TensorView& x, const TensorView& dx,
                            const std::function<double()>& loss, const std::string& what,
                            int64_t samples = 40) {
  ASSERT_EQ(x.dtype(), DType::kFloat64);
  ASSERT_EQ(x.numel(), dx.numel());
  double largest = 1;
  for (double v : values(dx)) largest = std::max(largest, std::abs(v));
  const int64_t step = std::max<int64_t>(1, x.numel() / samples);
  for (int64_t i = 0; i < x.numel(); i += step) {
    const double old = get(x, i), h = 1e-5 * std::max(1.0, std::abs(old));
    set(x, i, old + h);
    const double up = loss();
    set(x, i, old - h);
    const double down = loss();
    set(x, i, old);
    EXPECT_NEAR(get(dx, i), (up - down) / (2 * h), 1e-6 * largest) << what << " element " << i;
  }
}

// sum_i weight_i x_i: a loss whose gradient with respect to x is `weight`.
inline double dot(const TensorView& weight, const TensorView& x) {
  double sum = 0;
  for (int64_t i = 0; i < x.numel(); ++i) sum += get(weight, i) * get(x, i);
  return sum;
}

}  // namespace moiety::model
