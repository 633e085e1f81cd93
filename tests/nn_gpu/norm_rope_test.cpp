// Norm and rope in one pass on a GPU, from a captured graph, have the bits of norm, then rope.
#include <cmath>

#include "moiety/base/graph.h"
#include "tests/nn/norm_rope_cases.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"

namespace moiety::nn {
namespace {

class NormRopeGpu : public GpuTest, public testing::WithParamInterface<NormRopeCase> {
 protected:
  Mirror mirror(const NormRopeProblem& p) const {
    return Mirror({p.x, p.y, p.d, p.q_weight, p.k_weight, p.q_grad, p.k_grad, p.workspace, p.table,
                   p.position},
                  stream);
  }
  static NormRopeArgs there(const Mirror& m, const NormRopeArgs& a) {
    const HeadAngles& at = a.angles;
    return {m(a.x_TGNC),
            m(a.q_weight_C),
            m(a.k_weight_C),
            m(a.y_TGNC),
            {m(at.table), m(at.position_T), at.seq_len},
            a.eps};
  }
  static NormRopeBackwardArgs there(const Mirror& m, NormRopeBackwardArgs a) {
    for (TensorView* x : {&a.x_TGNC, &a.q_weight_C, &a.k_weight_C, &a.d_TGNC, &a.q_grad_C,
                          &a.k_grad_C, &a.workspace, &a.angles.table, &a.angles.position_T}) {
      *x = m(*x);
    }
    return a;
  }
};
INSTANTIATE_TEST_SUITE_P(Shapes, NormRopeGpu, testing::ValuesIn(kNormRopeCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(NormRopeGpu, HasTheBitsOfTheReference) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    SCOPED_TRACE(name(dtype));
    const NormRopeProblem p(GetParam(), dtype);
    const Mirror m = mirror(p);
    const NormRopeArgs forward = there(m, p.forward());
    const NormRopeBackwardArgs backward = there(m, p.backward());
    const Graph graph(stream, [&] {
      norm_rope(forward, stream);
      norm_rope_backward(backward, stream);
    });
    graph.launch(stream);
    norm_then_rope(p.forward(), {});
    rope_then_norm_backward(p.backward(), {});
    EXPECT_EQ(m.difference("y, also outside the view", p.y), "");
    EXPECT_EQ(m.difference("dx, also outside the view", p.d), "");
    EXPECT_EQ(m.difference("gradient of the query weight", p.q_grad), "");
    EXPECT_EQ(m.difference("gradient of the key weight", p.k_grad), "");
    EXPECT_EQ(m.difference("x", p.x), "");
  }
}

TEST_P(NormRopeGpu, ForwardWorksInPlace) {
  const NormRopeProblem p(GetParam(), DType::kBFloat16);
  const Mirror m = mirror(p);
  NormRopeArgs a = p.forward();
  a.y_TGNC = a.x_TGNC;
  norm_rope(there(m, a), stream);
  norm_then_rope(a, {});
  EXPECT_EQ(m.difference("y over x", p.x), "");
}

class NormRopeGpuTest : public NormRopeGpu {};

// Heads in one pass that are many waves of thread blocks, as a model has them.
TEST_F(NormRopeGpuTest, ManyTokens) {
  for (const int64_t head_dim : {64, 128}) {
    const NormRopeProblem p({"", 4499, 4, 8, head_dim, true, true}, DType::kBFloat16);
    ASSERT_TRUE(one_pass(p.forward()) && one_pass(p.backward()));
    const Mirror m = mirror(p);
    norm_rope(there(m, p.forward()), stream);
    norm_rope_backward(there(m, p.backward()), stream);
    norm_then_rope(p.forward(), {});
    rope_then_norm_backward(p.backward(), {});
    EXPECT_EQ(m.difference("y", p.y), "");
    EXPECT_EQ(m.difference("dx", p.d), "");
    EXPECT_EQ(m.difference("gradient of the query weight", p.q_grad), "");
    EXPECT_EQ(m.difference("gradient of the key weight", p.k_grad), "");
  }
}

// Heads that begin anywhere take the operations one after the other.
TEST_F(NormRopeGpuTest, AnyAlignment) {
  const NormRopeProblem p({"", 21, 2, 3, 72}, DType::kBFloat16);
  const Tensor table = rope_table(NormRopeProblem::kPositions, 64, 1e4);
  NormRopeArgs a = p.forward();
  for (TensorView* x : {&a.x_TGNC, &a.y_TGNC}) *x = x->slice(3, 1, 65);
  for (TensorView* x : {&a.q_weight_C, &a.k_weight_C}) *x = x->slice(0, 1, 65);
  a.angles.table = table;
  ASSERT_FALSE(one_pass(a));
  const Mirror m({p.x, p.y, p.q_weight, p.k_weight, table}, stream);
  norm_rope(there(m, a), stream);
  norm_then_rope(a, {});
  EXPECT_EQ(m.difference("y", p.y), "");
}

TEST_F(NormRopeGpuTest, UnknownPositionsGiveNan) {
  const NormRopeProblem p({"", 4, 1, 2, 64, true}, DType::kBFloat16);
  const Tensor position = int32_tensor({0, NormRopeProblem::kPositions, -1, 3});
  const Mirror m({p.x, p.y, p.q_weight, p.k_weight, p.table, position}, stream);
  NormRopeArgs a = p.forward();
  a.angles.position_T = position;
  norm_rope(there(m, a), stream);
  const Tensor got = m.back(p.y);
  for (int64_t i = 0; i < a.y_TGNC.numel(); ++i) {
    const int64_t t = i / (3 * 64);
    EXPECT_EQ(std::isnan(get(p.view(got), i)), t == 1 || t == 2) << i;
  }
}

}  // namespace
}  // namespace moiety::nn
