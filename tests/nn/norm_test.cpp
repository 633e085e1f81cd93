#include "moiety/base/parallel.h"
#include "tests/nn/norm_cases.h"
#include "tests/quant/amax_of.h"
#include "tests/support/gradient.h"

namespace moiety::nn {
namespace {

class Norm : public testing::TestWithParam<NormCase> {};
INSTANTIATE_TEST_SUITE_P(Shapes, Norm, testing::ValuesIn(kNormCases),
                         [](const auto& info) { return std::string(info.param.name); });

class NormBits : public Norm {};
INSTANTIATE_TEST_SUITE_P(Shapes, NormBits, testing::ValuesIn(kNormCases),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Many, NormBits, testing::ValuesIn(kNormManyRows),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(NormBits, FastPathHasTheBitsOfTheReference) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const bool accumulate : {false, true}) {
      const NormProblem a(GetParam(), dtype), b(GetParam(), dtype);
      norm_ref(a.forward());
      norm_cpu(b.forward());
      expect_same_bits(a.y.view, b.y.view, "y");
      norm_backward_ref(a.backward(accumulate));
      norm_backward_cpu(b.backward(accumulate));
      expect_same_bits(a.dx.view, b.dx.view, "dx");
      expect_same_bits(a.grad, b.grad, "grad");
    }
  }
}

TEST_P(Norm, IsItsDefinition) {
  const NormProblem p(GetParam(), DType::kFloat64);
  norm(p.forward(), {});
  const int64_t n = GetParam().n;
  for (int64_t row = 0; row < row_count(p.x.view); ++row) {
    double squares = 0;
    for (int64_t d = 0; d < n; ++d) squares += std::pow(get(p.x.view, row * n + d), 2);
    const double r = 1 / std::sqrt(squares / double(n) + double(1e-3f));
    for (int64_t d = 0; d < n; ++d) {
      ASSERT_NEAR(get(p.y.view, row * n + d), get(p.x.view, row * n + d) * r * get(p.weight, d),
                  1e-12);
    }
  }
}

TEST_P(Norm, BackwardMatchesCentralDifferences) {
  const NormProblem p(GetParam(), DType::kFloat64);
  norm_backward(p.backward(false), {});
  const auto loss = [&] {
    norm(p.forward(), {});
    return dot(p.dy.view, p.y.view) + (p.with_addend ? dot(p.addend.view, p.x.view) : 0);
  };
  expect_gradient(p.x.view, p.dx.view, loss, "dx");
  expect_gradient(p.weight, p.grad, loss, "weight");
}

// The sink has the bits of compute_amax of the stored y (docs/spec/formats.md#amax-from-elsewhere).
TEST(NormTest, SinkHasTheAmaxOfY) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int64_t rows : {0, 1, 200}) {
      for (const double special : {0.0, 1e4, double{INFINITY}, double{NAN}}) {
        SCOPED_TRACE(text("{} rows, {}", rows, special));
        const NormProblem p({"", rows, 48}, dtype);
        if (rows > 0) put(p.x.view, rows * 48 - 3, special);
        if (special == 0) fill_normal(p.weight, 1, 0);
        const Tensor amax = normal_tensor(DType::kFloat32, {1}, 3, 1, 100);
        NormArgs args = p.forward();
        args.sink = {amax};
        for (const auto& run : {norm_ref, norm_cpu}) {
          const ThreadBudget threads(3);
          args.sink.clear();
          run(args);
          EXPECT_EQ(bits_of(amax), quant::amax_of(p.y.view, nullptr));
        }
        fill_normal(amax, 3, 1, 100);
        norm(args, {});
        EXPECT_EQ(bits_of(amax), quant::amax_of(p.y.view, nullptr));
      }
    }
  }
  const NormProblem exact({"", 2, 8}, DType::kFloat64);
  NormArgs args = exact.forward();
  const Tensor amax(DType::kFloat32, {1});
  args.sink = {amax};
  EXPECT_THROW(norm(args, {}), Error);
}

TEST(NormTest, WorksInPlaceAndWithAnyNumberOfThreads) {
  const NormCase c{"", 300, 32, false, true};
  const int threads = thread_budget();
  set_thread_budget(1);
  const NormProblem a(c, DType::kBFloat16), b(c, DType::kBFloat16);
  norm(a.forward(), {});
  norm_backward(a.backward(true), {});
  set_thread_budget(3);
  NormBackwardArgs backward = b.backward(true);
  backward.dx = backward.addend;
  norm_backward(backward, {});
  norm({b.x.view, b.weight, b.x.view, 1e-3f}, {});
  set_thread_budget(threads);
  expect_same_bits(a.y.view, b.x.view, "y in place of x");
  expect_same_bits(a.dx.view, b.addend.view, "dx in place of the addend");
  expect_same_bits(a.grad, b.grad, "grad");
}

}  // namespace
}  // namespace moiety::nn
