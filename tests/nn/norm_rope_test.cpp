#include "moiety/nn/norm.h"
#include "moiety/nn/rows.h"
#include "tests/nn/norm_rope_cases.h"
#include "tests/support/gradient.h"

namespace moiety::nn {
namespace {

class NormRope : public testing::TestWithParam<NormRopeCase> {};
INSTANTIATE_TEST_SUITE_P(Shapes, NormRope, testing::ValuesIn(kNormRopeCases),
                         [](const auto& info) { return std::string(info.param.name); });

RopeArgs rotation(const TensorView& x, const HeadAngles& angles, bool inverse) {
  return {x, angles.table, angles.position_T, angles.seq_len, inverse};
}

// Norms with the scalar reference heads that lie in a tensor of their own.
void norm_heads(const NormRopeProblem& p, int64_t begin, int64_t end, const TensorView& weight) {
  norm_ref({p.view(p.x).slice(2, begin, end), weight, p.view(p.y).slice(2, begin, end), 1e-3f});
}

TEST_P(NormRope, HasTheBitsOfNormThenRope) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    const NormRopeProblem a(GetParam(), dtype), b(GetParam(), dtype);
    const int64_t keys = a.c.queries;
    norm_heads(a, 0, keys, a.q_weight);
    norm_heads(a, keys, keys + 1, a.k_weight);
    rope_ref(rotation(a.view(a.y), a.angles(), false));
    norm_rope(b.forward(), {});
    expect_same_bits(a.y, b.y, "y, also outside the view");
    NormRopeArgs in_place = b.forward();
    in_place.y_TGNC = in_place.x_TGNC;
    norm_rope(in_place, {});
    expect_same_bits(a.view(a.y), b.view(b.x), "y in place of x");
  }
}

TEST_P(NormRope, BackwardHasTheBitsOfRopeThenNorm) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    const NormRopeProblem a(GetParam(), dtype), b(GetParam(), dtype);
    const TensorView x = a.view(a.x), d = a.view(a.d);
    const int64_t keys = a.c.queries;
    rope_ref(rotation(d, a.angles(), true));
    const auto norm_gradient = [&](int64_t begin, int64_t end, const Tensor& weight,
                                   const Tensor& grad) {
      const TensorView part = d.slice(2, begin, end);
      const Tensor workspace(grad.view().dtype(),
                             {norm_blocks(row_count(part), a.c.head_dim), a.c.head_dim});
      norm_backward_ref(
          {x.slice(2, begin, end), weight, part, {}, part, grad, workspace, 1e-3f, a.c.accumulate});
    };
    norm_gradient(0, keys, a.q_weight, a.q_grad);
    norm_gradient(keys, keys + 1, a.k_weight, a.k_grad);
    norm_rope_backward(b.backward(), {});
    expect_same_bits(a.d, b.d, "dx, also outside the view");
    expect_same_bits(a.q_grad, b.q_grad, "gradient of the query weight");
    expect_same_bits(a.k_grad, b.k_grad, "gradient of the key weight");
  }
}

TEST(NormRopeTest, BackwardMatchesCentralDifferences) {
  const NormRopeProblem p({"", 9, 2, 3, 10, true}, DType::kFloat64);
  const Tensor dy = converted(p.view(p.d), DType::kFloat64);
  norm_rope_backward(p.backward(), {});
  const auto loss = [&] {
    norm_rope(p.forward(), {});
    return dot(dy, p.view(p.y));
  };
  expect_gradient(p.view(p.x), p.view(p.d), loss, "x");
  expect_gradient(p.q_weight, p.q_grad, loss, "query weight");
  expect_gradient(p.k_weight, p.k_grad, loss, "key weight");
}

TEST(NormRopeTest, RefusesWhatDoesNotFit) {
  const NormRopeProblem p({"", 6, 2, 3, 8}, DType::kFloat32);
  const auto expect_error = [&](const char* argument, const auto& change) {
    NormRopeArgs forward = p.forward();
    change(forward);
    try {
      norm_rope(forward, {});
      ADD_FAILURE() << argument;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(argument), std::string::npos) << e.what();
    }
  };
  const Tensor short_weight(DType::kFloat32, {4}), narrow(DType::kBFloat16, {6, 2, 4, 8});
  expect_error("x is", [](NormRopeArgs& a) { a.x_TGNC = a.x_TGNC.slice(2, 0, 1); });
  expect_error("y", [&](NormRopeArgs& a) { a.y_TGNC = narrow; });
  expect_error("q_weight", [&](NormRopeArgs& a) { a.q_weight_C = short_weight; });
  expect_error("k_weight", [&](NormRopeArgs& a) { a.k_weight_C = short_weight; });
  expect_error("seq_len", [](NormRopeArgs& a) { a.angles.seq_len = 51; });
  NormRopeBackwardArgs backward = p.backward();
  backward.workspace = backward.workspace.slice(0, 0, 1);
  EXPECT_THROW(norm_rope_backward(backward, {}), Error);
}

}  // namespace
}  // namespace moiety::nn
