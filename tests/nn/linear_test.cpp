#include "moiety/nn/linear.h"

#include <gtest/gtest.h>

#include "tests/support/tensors.h"

namespace moiety::nn {
namespace {

// Integers: sums are exact, so each result is one number.
struct Problem {
  Problem() {
    uint32_t seed = 0;
    for (const Tensor* t : {&x, &w, &y, &residual, &dx, &dw}) fill_integers(*t, ++seed, 4);
  }

  Tensor x{DType::kFloat32, {5, 7}}, w{DType::kFloat32, {3, 7}};
  Tensor y{DType::kFloat32, {5, 3}}, residual{DType::kFloat32, {5, 3}};
  Tensor dx{DType::kFloat32, {5, 7}}, dw{DType::kFloat32, {3, 7}};
};

TEST(Linear, AddsTheResidualIfThereIsOne) {
  for (const bool with_residual : {false, true}) {
    const Problem p;
    linear(p.x, p.w, p.y, with_residual ? p.residual.view() : TensorView(), Stream());
    for (int64_t t = 0; t < 5; ++t) {
      for (int64_t n = 0; n < 3; ++n) {
        double sum = with_residual ? get(p.residual, t, n) : 0;
        for (int64_t k = 0; k < 7; ++k) sum += get(p.x, t, k) * get(p.w, n, k);
        ASSERT_EQ(get(p.y, t, n), sum) << with_residual;
      }
    }
  }
}

TEST(Linear, InputGradientMayBeAddedToItself) {
  for (const bool add : {false, true}) {
    const Problem p;
    const Tensor before = copy_of(p.dx);
    linear_input_gradient(p.y, p.w, p.dx, add ? p.dx.view() : TensorView(), Stream());
    for (int64_t t = 0; t < 5; ++t) {
      for (int64_t k = 0; k < 7; ++k) {
        double sum = add ? get(before, t, k) : 0;
        for (int64_t n = 0; n < 3; ++n) sum += get(p.y, t, n) * get(p.w, n, k);
        ASSERT_EQ(get(p.dx, t, k), sum) << add;
      }
    }
  }
}

TEST(Linear, WeightGradientOverwritesOrAccumulates) {
  for (const bool accumulate : {false, true}) {
    const Problem p;
    const Tensor before = copy_of(p.dw);
    linear_weight_gradient(p.y, p.x, p.dw, accumulate, Stream());
    for (int64_t n = 0; n < 3; ++n) {
      for (int64_t k = 0; k < 7; ++k) {
        double sum = accumulate ? get(before, n, k) : 0;
        for (int64_t t = 0; t < 5; ++t) sum += get(p.y, t, n) * get(p.x, t, k);
        ASSERT_EQ(get(p.dw, n, k), sum) << accumulate;
      }
    }
  }
}

}  // namespace
}  // namespace moiety::nn
