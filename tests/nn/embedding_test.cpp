#include "tests/nn/embedding_cases.h"
#include "tests/support/gradient.h"

namespace moiety::nn {
namespace {

class Embedding : public testing::TestWithParam<EmbeddingCase> {};
INSTANTIATE_TEST_SUITE_P(Shapes, Embedding, testing::ValuesIn(kEmbeddingCases),
                         [](const auto& info) { return std::string(info.param.name); });

Tensor backward(const EmbeddingCase& c, const TensorView& dout, bool accumulate,
                const Tensor* grad_in) {
  const Tensor token = int32_tensor(c.tokens);
  const DType compute = compute_dtype(dout.dtype());
  Tensor grad(compute, {c.vocabulary, c.d_model}),
      workspace(DType::kInt64, {static_cast<int64_t>(c.tokens.size())});
  if (grad_in) std::memcpy(grad.view().raw(), grad_in->view().raw(), grad.view().bytes());
  embedding_backward({dout, token, grad, workspace, accumulate}, {});
  return grad;
}

TEST_P(Embedding, CopiesRows) {
  const EmbeddingCase& c = GetParam();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Tensor table = normal_tensor(dtype, {c.vocabulary, c.d_model}, 1);
    const Tensor token = int32_tensor(c.tokens);
    Tensor out(dtype, {token.view().numel(), c.d_model});
    embedding({table, token, out}, {});
    for (size_t t = 0; t < c.tokens.size(); ++t) {
      expect_same_bits(out.view().select(t), table.view().select(c.tokens[t]), "row");
    }
  }
}

TEST_P(Embedding, BackwardSumsInTheOrderOfTheHeader) {
  const EmbeddingCase& c = GetParam();
  const int64_t n = c.d_model;
  const Tensor dout =
      normal_tensor(DType::kBFloat16, {static_cast<int64_t>(c.tokens.size()), n}, 2);
  std::vector<float> expected(c.vocabulary * n);
  for (int64_t v = 0; v < c.vocabulary; ++v) {
    for (int64_t d = 0; d < n; ++d) {
      float total = 0, block = 0;
      int64_t count = 0;
      for (size_t t = 0; t < c.tokens.size(); ++t) {
        if (c.tokens[t] != v) continue;
        block += float(dout.data<bf16>()[t * n + d]);
        if (++count % 64 == 0) total += std::exchange(block, 0.0f);
      }
      expected[v * n + d] = total + block;
    }
  }
  const Tensor first = backward(c, dout, false, nullptr);
  const Tensor second = backward(c, dout, true, &first);
  const Tensor poison = normal_tensor(DType::kFloat32, {c.vocabulary, n}, 3);
  const Tensor overwritten = backward(c, dout, false, &poison);
  for (int64_t i = 0; i < first.view().numel(); ++i) {
    ASSERT_EQ(first.data<float>()[i], expected[i]) << i;
    ASSERT_EQ(second.data<float>()[i], expected[i] + expected[i]) << i;
    ASSERT_EQ(overwritten.data<float>()[i], expected[i]) << i;
  }
}

TEST_P(Embedding, BackwardMatchesCentralDifferences) {
  const EmbeddingCase& c = GetParam();
  const int64_t tokens = c.tokens.size();
  const Tensor table = normal_tensor(DType::kFloat64, {c.vocabulary, c.d_model}, 1);
  const Tensor dout = normal_tensor(DType::kFloat64, {tokens, c.d_model}, 2);
  const Tensor token = int32_tensor(c.tokens);
  Tensor out(DType::kFloat64, {tokens, c.d_model});
  expect_gradient(
      table, backward(c, dout, false, nullptr),
      [&] {
        embedding({table, token, out}, {});
        return dot(dout, out);
      },
      "table");
}

TEST(EmbeddingTest, RefusesTokensOutsideTheVocabulary) {
  const Tensor table(DType::kFloat32, {4, 2}), token = int32_tensor({0, 4}),
                                               out(DType::kFloat32, {2, 2});
  EXPECT_THROW(embedding({table, token, out}, {}), Error);
  token.data<int32_t>()[1] = -1;
  EXPECT_THROW(embedding({table, token, out}, {}), Error);
}

}  // namespace
}  // namespace moiety::nn
