#include "tests/nn/loss_cases.h"
#include "tests/support/bits.h"
#include "tests/support/gradient.h"

namespace moiety::nn {
namespace {

// sum of loss + z_coef lse^2 and the losses, in double, from the definition.
double objective(const LossProblem& p, std::vector<double>* losses = nullptr) {
  double total = 0;
  for (int64_t t = 0; t < p.c.tokens; ++t) {
    if (losses) losses->push_back(0);
    if (!p.valid(t)) continue;
    std::vector<double> z(p.c.vocabulary);
    double sum = 0;
    for (int64_t v = 0; v < p.c.vocabulary; ++v) {
      for (int64_t d = 0; d < p.c.d_model; ++d) {
        z[v] += get(p.x, t * p.c.d_model + d) * get(p.head, v * p.c.d_model + d);
      }
      sum += std::exp(z[v]);
    }
    const double lse = std::log(sum), loss = lse - z[p.target.data<int32_t>()[t]];
    if (losses) losses->back() = loss;
    total += loss + double(p.c.z_coef) * lse * lse;
  }
  return total;
}

class Loss : public testing::TestWithParam<LossCase> {};
INSTANTIATE_TEST_SUITE_P(Shapes, Loss, testing::ValuesIn(kLossCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Loss, DoubleMatchesDefinitionAndCentralDifferences) {
  const LossProblem p(GetParam(), DType::kFloat64);
  linear_cross_entropy(p.args(true), {});
  std::vector<double> expected;
  objective(p, &expected);
  for (int64_t t = 0; t < p.c.tokens; ++t) EXPECT_NEAR(get(p.loss, t), expected[t], 1e-11);
  expect_gradient(
      p.x, p.dx, [&] { return objective(p); }, "dx", 20);
  expect_gradient(
      p.head, p.grad, [&] { return objective(p); }, "dhead", 20);
}

TEST_P(Loss, FloatAndBf16MatchDouble) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const LossProblem p(GetParam(), dtype);
    LossProblem exact(GetParam(), DType::kFloat64);
    exact.x = converted(p.x, DType::kFloat64);
    exact.head = converted(p.head, DType::kFloat64);
    linear_cross_entropy(exact.args(true), {});
    linear_cross_entropy(p.args(false), {});
    const std::vector<double> eval = values(p.loss);
    linear_cross_entropy(p.args(true), {});
    const double u = dtype == DType::kFloat32 ? 0x1p-23 : 0x1p-8;
    for (int64_t t = 0; t < p.c.tokens; ++t) {
      EXPECT_EQ(get(p.loss, t), eval[t]) << "the loss alone is the same";
      EXPECT_NEAR(eval[t], get(exact.loss, t), 1e-5 * (1 + get(exact.loss, t)));
    }
    for (int64_t i = 0; i < p.dx.view().numel(); ++i) {
      EXPECT_NEAR(get(p.dx, i), get(exact.dx, i), 32 * u) << i;
    }
    for (int64_t i = 0; i < p.grad.view().numel(); ++i) {
      EXPECT_NEAR(get(p.grad, i), get(exact.grad, i), 32 * u) << i;
    }
    const std::vector<double> first = values(p.grad);
    linear_cross_entropy(p.args(true, true), {});
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_NEAR(get(p.grad, i), 2 * first[i], 1e-5 * (1 + std::abs(first[i])));
    }
  }
}

// Either gradient alone has the bits that it has beside the other.
TEST_P(Loss, GradientsMayBeLeftOut) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const LossProblem both(GetParam(), dtype), dx(GetParam(), dtype), grad(GetParam(), dtype);
    linear_cross_entropy(both.args(true), {});
    LinearCrossEntropyArgs only_dx = dx.args(true), only_grad = grad.args(true);
    only_dx.grad_VD = {};
    only_grad.dx_TD = {};
    const std::string untouched_grad = bytes_of(dx.grad), untouched_dx = bytes_of(grad.dx);
    linear_cross_entropy(only_dx, {});
    linear_cross_entropy(only_grad, {});
    EXPECT_EQ(bytes_of(dx.loss), bytes_of(both.loss));
    EXPECT_EQ(bytes_of(grad.loss), bytes_of(both.loss));
    EXPECT_EQ(bytes_of(dx.dx), bytes_of(both.dx));
    EXPECT_EQ(bytes_of(grad.grad), bytes_of(both.grad));
    EXPECT_EQ(bytes_of(dx.grad), untouched_grad);
    EXPECT_EQ(bytes_of(grad.dx), untouched_dx);
  }
}

TEST_P(Loss, FastRowsHaveTheBitsOfTheReference) {
  const LossCase& c = GetParam();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const LossProblem p(c, dtype);
    std::vector<Tensor> out;
    for (const bool fast : {false, true}) {
      const Tensor z = normal_tensor(DType::kFloat32, {c.tokens, c.vocabulary}, 4, 8);
      Tensor loss(DType::kFloat32, {c.tokens}), dz(dtype, {c.tokens, c.vocabulary});
      const CrossEntropyArgs a{z, p.target, p.mask_view(), loss, dz, c.z_coef};
      fast ? cross_entropy_cpu(a) : cross_entropy_ref(a);
      CrossEntropyArgs in_place = a;
      const std::vector<int64_t> sizes{c.tokens, c.vocabulary},
          strides{c.vocabulary * 32 / bits(dtype), 1};
      in_place.dlogits_NV = TensorView(z.view().raw(), dtype, sizes, strides);
      fast ? cross_entropy_cpu(in_place) : cross_entropy_ref(in_place);
      expect_same_bits(dz, in_place.dlogits_NV, "in place");
      out.push_back(std::move(loss));
      out.push_back(std::move(dz));
    }
    expect_same_bits(out[0], out[2], "loss");
    expect_same_bits(out[1], out[3], "dlogits");
  }
}

TEST(LossTest, LargeLogitsDoNotOverflow) {
  const Tensor z(DType::kFloat32, {2, 3}), target = int32_tensor({0, 2}),
                                           loss(DType::kFloat32, {2}), dz(DType::kFloat32, {2, 3});
  for (int i = 0; i < 6; ++i) z.data<float>()[i] = i % 3 == 1 ? 1e4f : -1e4f;
  z.data<float>()[5] = 1e4f;
  cross_entropy({z, target, {}, loss, dz}, {});
  EXPECT_EQ(loss.data<float>()[0], 2e4f);
  EXPECT_NEAR(loss.data<float>()[1], std::log(2.0), 1e-3);  // half an ulp of 1e4
  EXPECT_EQ(dz.data<float>()[0], -1.0f);
  EXPECT_EQ(dz.data<float>()[1], 1.0f);
  EXPECT_EQ(dz.data<float>()[5], -0.5f);
}

TEST(LossTest, ChunkKeepsLogitsWithin256MiBOrOf4096Tokens) {
  const Device gpu{DeviceType::kCuda, 0};
  EXPECT_EQ(loss_chunk(0, 100000, 151936, {}), 441);
  EXPECT_EQ(loss_chunk(0, 100000, 151936, gpu), 4096);
  EXPECT_EQ(loss_chunk(0, 100000, 8192, gpu), 8192);
  for (const Device device : {Device{}, gpu}) {
    EXPECT_EQ(loss_chunk(0, 2048, 264, device), 2048);
    EXPECT_EQ(loss_chunk(100, 2048, 264, device), 100);
    EXPECT_EQ(loss_chunk(0, 0, 264, device), 1);
  }
}

TEST(LossTest, RefusesTargetsOutsideTheVocabulary) {
  const Tensor z(DType::kFloat32, {1, 3}), loss(DType::kFloat32, {1});
  EXPECT_THROW(cross_entropy({z, int32_tensor({3}), {}, loss, {}}, {}), Error);
  EXPECT_THROW(cross_entropy({z, int32_tensor({-1}), {}, loss, {}}, {}), Error);
}

}  // namespace
}  // namespace moiety::nn
