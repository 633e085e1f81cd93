#include "moiety/nn/attention.h"
#include "tests/nn/rope_cases.h"
#include "tests/support/gradient.h"

namespace moiety::nn {
namespace {

TEST(Rope, TableHoldsCosinesAndSinesOfFloatAngles) {
  const Tensor table = rope_table(5000, 10, 1e6);
  for (const int64_t p : {0, 1, 777, 4999}) {
    for (int64_t i = 0; i < 5; ++i) {
      const float power = static_cast<float>(std::pow(1e6, 2.0 * double(i) / 10));
      const float angle = static_cast<float>(p) * (1.0f / power);
      EXPECT_EQ(table.data<float>()[(p * 2 + 0) * 5 + i], float(std::cos(double(angle))));
      EXPECT_EQ(table.data<float>()[(p * 2 + 1) * 5 + i], float(std::sin(double(angle))));
    }
  }
  // Position 1 of the first pair turns by one radian.
  EXPECT_FLOAT_EQ(table.data<float>()[10], 0.5403023f);
}

TEST(Rope, RotatesHalfSplitPairs) {
  const Tensor table = rope_table(7, 4, 100.0);
  Tensor x(DType::kFloat64, {7, 1, 1, 4});
  for (int64_t t = 0; t < 7; ++t) put(x, t * 4 + 1, 1.0);  // the unit vector of the second pair
  rope({x, table, {}, 7}, {});
  for (int64_t t = 0; t < 7; ++t) {
    EXPECT_NEAR(get(x, t * 4 + 1), std::cos(double(t) * 0.1), 1e-6);
    EXPECT_NEAR(get(x, t * 4 + 3), std::sin(double(t) * 0.1), 1e-6);
    EXPECT_EQ(get(x, t * 4), 0);
  }
}

TEST(Rope, FastPathHasTheBitsOfTheReference) {
  for (const int64_t head_dim : kHeadDims) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const bool inverse : {false, true}) {
        const Tensor table = rope_table(70, head_dim, 1e4);
        const RopeHeads a(dtype, 140, head_dim, 1), b(dtype, 140, head_dim, 1);
        rope_ref({a.view, table, {}, 70, inverse});
        rope_cpu({b.view, table, {}, 70, inverse});
        expect_same_bits(a.storage, b.storage, "all heads, also those outside the view");
      }
    }
  }
}

TEST(Rope, PositionsReplaceTheIndex) {
  const Tensor table = rope_table(10, 8, 1e4);
  const RopeHeads a(DType::kFloat32, 20, 8, 1), b(DType::kFloat32, 20, 8, 1);
  std::vector<int32_t> position;
  for (int32_t t = 0; t < 20; ++t) position.push_back(t % 10);
  rope({a.view, table, {}, 10}, {});
  rope({b.view, table, int32_tensor(position), 10}, {});
  expect_same_bits(a.view, b.view, "x");
  position[3] = 10;
  EXPECT_THROW(rope({b.view, table, int32_tensor(position), 10}, {}), Error);
  EXPECT_THROW(rope({b.view, table, {}, 11}, {}), Error);
}

TEST(Rope, InverseIsTheGradient) {
  const Tensor table = rope_table(6, 10, 1e4);
  const RopeHeads x(DType::kFloat64, 12, 10, 1), weight(DType::kFloat64, 12, 10, 2);
  const Tensor dx = converted(weight.view, DType::kFloat64);
  rope({dx, table, {}, 6, true}, {});
  expect_gradient(
      x.view, dx,
      [&] {
        const Tensor y = converted(x.view, DType::kFloat64);
        rope({y, table, {}, 6}, {});
        return dot(weight.view, y);
      },
      "x");
}

}  // namespace
}  // namespace moiety::nn
