// Gradients held against central differences.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>

#include "tests/support/tensors.h"

namespace moiety {

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
    put(x, i, old + h);
    const double up = loss();
    put(x, i, old - h);
    const double down = loss();
    put(x, i, old);
    EXPECT_NEAR(get(dx, i), (up - down) / (2 * h), 1e-6 * largest) << what << " element " << i;
  }
}

// sum_i weight_i x_i: a loss whose gradient with respect to x is `weight`.
inline double dot(const TensorView& weight, const TensorView& x) {
  double sum = 0;
  for (int64_t i = 0; i < x.numel(); ++i) sum += get(weight, i) * get(x, i);
  return sum;
}

}  // namespace moiety
