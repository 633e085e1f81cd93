// The embedding on a GPU, from a captured graph, has the bits of the CPU.
#include "moiety/base/graph.h"
#include "tests/nn/embedding_cases.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"

namespace moiety::nn {
namespace {

// `distinct` tokens, some much more frequent than others.
std::vector<int32_t> skewed(int64_t n, int32_t distinct) {
  std::vector<int32_t> out;
  uint32_t state = 1;
  for (int64_t i = 0; i < n; ++i) {
    state = state * 1664525 + 1013904223;
    const auto bits = static_cast<int32_t>(state >> 20);
    out.push_back(bits % (1 + (bits >> 4) % distinct));
  }
  return out;
}

class EmbeddingGpu : public GpuTest {
 protected:
  // Compares the devices, also for a slice of the table.
  void compare(const EmbeddingCase& c, DType dtype, const VocabularySlice& slice) const {
    const auto tokens = static_cast<int64_t>(c.tokens.size());
    const Tensor token = int32_tensor(c.tokens);
    const Tensor table = normal_tensor(dtype, {c.vocabulary, c.d_model}, 1),
                 dout = normal_tensor(dtype, {tokens, c.d_model}, 2),
                 out = normal_tensor(dtype, {tokens, c.d_model}, 3),
                 grad = normal_tensor(DType::kFloat32, {c.vocabulary, c.d_model}, 4);
    const Tensor workspace(DType::kInt64, {tokens});
    for (const bool accumulate : {false, true}) {
      const Mirror m({table, token, out, dout, grad, workspace}, stream);
      const Graph graph(stream, [&] {
        embedding({m(table), m(token), m(out), slice}, stream);
        embedding_backward({m(dout), m(token), m(grad), m(workspace), accumulate, slice}, stream);
      });
      graph.launch(stream);
      embedding({table, token, out, slice}, {});
      embedding_backward({dout, token, grad, workspace, accumulate, slice}, {});
      EXPECT_EQ(m.difference("out", out), "");
      EXPECT_EQ(m.difference("order of occurrences", workspace), "");
      EXPECT_EQ(m.difference("grad", grad), "");
    }
  }
};

TEST_F(EmbeddingGpu, HasTheBitsOfTheCpu) {
  std::vector<EmbeddingCase> cases(std::begin(kEmbeddingCases), std::end(kEmbeddingCases));
  cases.push_back({"a_long_run", 9, 264, repeated(1500, 1)});
  cases.push_back({"skewed", 400, 520, skewed(5000, 400)});
  cases.push_back({"blocks_of_64_exactly", 3, 257, std::vector<int32_t>(128, 2)});
  cases.push_back({"one_more", 3, 256, std::vector<int32_t>(65, 1)});
  for (const EmbeddingCase& c : cases) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      SCOPED_TRACE(text("{} {}", c.name, name(dtype)));
      compare(c, dtype, {});
      compare(c, dtype, {.first = 1, .vocabulary = c.vocabulary + 3});
    }
  }
}

TEST_F(EmbeddingGpu, UnknownTokensGiveNanAndNoGradient) {
  const Tensor token = int32_tensor({0, 4, -1, INT32_MAX, INT32_MIN, 3});
  const Tensor table = normal_tensor(DType::kBFloat16, {4, 16}, 1),
               out = normal_tensor(DType::kBFloat16, {6, 16}, 2),
               grad = normal_tensor(DType::kFloat32, {4, 16}, 3);
  const Tensor workspace(DType::kInt64, {6});
  const Mirror m({table, token, out, grad, workspace}, stream);
  embedding({m(table), m(token), m(out)}, stream);
  const Tensor got = m.back(out);
  for (int64_t i = 0; i < 6 * 16; ++i) {
    EXPECT_EQ(std::isnan(get(got, i)), i / 16 >= 1 && i / 16 <= 4) << i;
  }
  copy(m(out), normal_tensor(DType::kBFloat16, {6, 16}, 2), stream);
  embedding_backward({m(out), m(token), m(grad), m(workspace)}, stream);
  const Tensor sums = m.back(grad);
  for (int64_t i = 0; i < 4 * 16; ++i) {
    const int64_t row = i / 16, from = row == 0 ? 0 : 5;
    const double expected = row == 0 || row == 3 ? get(out, from * 16 + i % 16) : 0;
    EXPECT_EQ(get(sums, i), expected) << i;
  }
}

}  // namespace
}  // namespace moiety::nn
