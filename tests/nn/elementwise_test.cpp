#include "moiety/nn/elementwise.h"

#include "tests/support/tensors.h"

namespace moiety::nn {
namespace {

TEST(Elementwise, DocumentsBeginWherePositionsRestart) {
  const Tensor position(DType::kInt32, {2, 4}), start(DType::kInt32, {2, 4});
  const int32_t positions[] = {0, 1, 0, 1, 0, 0, 1, 2}, expected[] = {0, 0, 2, 2, 0, 1, 1, 1};
  std::memcpy(position.view().raw(), positions, sizeof positions);
  document_starts(position, start, {});
  for (int i = 0; i < 8; ++i) EXPECT_EQ(start.data<int32_t>()[i], expected[i]) << i;
}

TEST(Elementwise, RoundsToNearestEven) {
  const Tensor x(DType::kFloat32, {3}), out(DType::kBFloat16, {3});
  const float values[] = {1 + 0x1p-8f, 1 + 0x1.8p-7f, -0.0f};
  std::memcpy(x.view().raw(), values, sizeof values);
  round_to_bf16(x, out, false, {});
  const uint16_t expected[] = {0x3F80, 0x3F82, 0x8000};
  for (int i = 0; i < 3; ++i) EXPECT_EQ(out.data<bf16>()[i].bits, expected[i]) << i;
  round_to_bf16(x, out, true, {});  // 2 + 2^-8, 2.0234375 + 2^-8, -0
  const uint16_t sums[] = {0x4000, 0x4002, 0x8000};
  for (int i = 0; i < 3; ++i) EXPECT_EQ(out.data<bf16>()[i].bits, sums[i]) << i;
}

TEST(Elementwise, SigmoidAndItsGradient) {
  const Tensor x(DType::kFloat32, {2}), dy(DType::kFloat32, {2}), dx(DType::kFloat32, {2});
  put(x, 1, -1.5);
  put(dy, 0, 2);
  put(dy, 1, 1);
  apply_sigmoid(x, {});
  EXPECT_EQ(get(x, 0), 0.5);
  EXPECT_NEAR(get(x, 1), 1 / (1 + std::exp(1.5)), 1e-7);
  sigmoid_gradient(x, dy, dx, {});
  EXPECT_EQ(get(dx, 0), 0.5);
  EXPECT_NEAR(get(dx, 1), get(x, 1) * (1 - get(x, 1)), 1e-7);
}

TEST(Elementwise, ErrorsNameTheArgument) {
  const Tensor x(DType::kFloat32, {4}), out(DType::kBFloat16, {3});
  EXPECT_THROW(round_to_bf16(x, out, false, {}), Error);
  EXPECT_THROW(apply_sigmoid(out, {}), Error);
}

}  // namespace
}  // namespace moiety::nn
