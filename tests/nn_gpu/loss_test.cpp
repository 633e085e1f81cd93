// Cross-entropy of rows of logits on a GPU, from a captured graph, has the bits of the reference.
#include "moiety/base/graph.h"
#include "tests/nn/loss_cases.h"
#include "tests/support/bits.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"

namespace moiety::nn {
namespace {

class LossGpu : public GpuTest {
 protected:
  void compare(const LossCase& c, DType dtype, double scale) const {
    const LossProblem p(c, DType::kFloat32);
    const Tensor z = normal_tensor(DType::kFloat32, {c.tokens, c.vocabulary}, 4, scale),
                 dz = normal_tensor(dtype, {c.tokens, c.vocabulary}, 5);
    const Mirror m({z, p.target, p.mask, p.loss, dz}, stream);
    const std::vector<int64_t> sizes{c.tokens, c.vocabulary},
        strides{c.vocabulary * 32 / bits(dtype), 1};
    const TensorView over(z.view().raw(), dtype, sizes, strides);
    const auto run = [&](const TensorView& dlogits) {
      const Graph graph(stream, [&] {
        cross_entropy({m(z), m(p.target), m(p.mask_view()), m(p.loss), dlogits, c.z_coef}, stream);
      });
      graph.launch(stream);
    };
    run({});
    cross_entropy_ref({z, p.target, p.mask_view(), p.loss, {}, c.z_coef});
    EXPECT_EQ(m.difference("loss alone", p.loss), "");
    fill_bytes(m(p.loss), 0xA5, stream);
    run(m(dz));
    cross_entropy_ref({z, p.target, p.mask_view(), p.loss, dz, c.z_coef});
    EXPECT_EQ(m.difference("loss", p.loss), "");
    EXPECT_EQ(m.difference("dlogits", dz), "");
    EXPECT_EQ(m.difference("logits", z), "");
    run(m(over));
    cross_entropy_ref({z, p.target, p.mask_view(), p.loss, over, c.z_coef});
    EXPECT_EQ(m.difference("dlogits over logits", z), "");
  }
};

TEST_F(LossGpu, HasTheBitsOfTheReference) {
  std::vector<LossCase> cases(std::begin(kLossCases), std::end(kLossCases));
  cases.push_back({"one_word", 3, 1, 1, 1});
  cases.push_back({"vocabulary_in_shared_memory", 5, 10240, 1, 1, 1e-4f});
  cases.push_back({"one_logit_more", 3, 10241, 1, 1});
  cases.push_back({"four_logits_more", 3, 10244, 1, 1});
  cases.push_back({"large_vocabulary_of_fours", 5, 50304, 1, 1, 1e-4f, true});
  cases.push_back({"large_vocabulary", 9, 50257, 1, 1, 1e-4f, true});
  for (const LossCase& c : cases) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const double scale : {1.0, 40.0}) {
        SCOPED_TRACE(text("{} {} {}", c.name, name(dtype), scale));
        compare(c, dtype, scale);
      }
    }
  }
}

// Rows that are read once: where the kernels of one, two and four blocks a row begin and end, and
// more rows than clusters.
TEST_F(LossGpu, RowsReadOnceHaveTheBitsOfTheReference) {
  const LossCase cases[] = {
      {"one_row", 1, 32000, 1, 1},
      {"shortest", 3, 20488, 1, 1, 1e-4f, true},
      {"rows_of_fours", 3, 20484, 1, 1, 1e-4f, true},
      {"rows_of_several_turns", 400, 20992, 1, 1, 0, true},
      {"longest_of_a_block", 5, 51200, 1, 1},
      {"shortest_of_two", 140, 51208, 1, 1, 1e-4f},
      {"longest_of_two", 5, 102400, 1, 1, 0, true},
      {"shortest_of_four", 40, 102408, 1, 1, 1e-4f, true},
      {"large", 6, 151936, 1, 1, 1e-4f},
      {"longest_of_four_in_fewer_registers", 3, 163840, 1, 1},
      {"shortest_of_four_in_more_registers", 3, 163848, 1, 1},
      {"longest", 5, 204800, 1, 1},
      {"too_long", 5, 204808, 1, 1, 1e-4f, true},
  };
  for (const LossCase& c : cases) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      SCOPED_TRACE(text("{} {}", c.name, name(dtype)));
      compare(c, dtype, dtype == DType::kFloat32 ? 1 : 40);
    }
  }
}

// A warp looks at the targets of 32 of its rows at a time. The rows are 33 times the same ones.
TEST_F(LossGpu, MoreRowsThanAWarpLooksAtAtATime) {
  constexpr int64_t kTimes = 33, kRows = 140, kVocabulary = 20488;
  const DType single = DType::kFloat32, half = DType::kBFloat16;
  const LossProblem p({"", kRows, kVocabulary, 1, 1, 0, true}, single);
  const Tensor z = normal_tensor(single, {kRows, kVocabulary}, 4), dz(half, {kRows, kVocabulary});
  cross_entropy_cpu({z, p.target, p.mask_view(), p.loss, dz, 0});
  const auto repeated = [&](const TensorView& x) {
    std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
    sizes[0] *= kTimes;
    Tensor out(x.dtype(), sizes, kGpu, "operand");
    for (int64_t i = 0; i < kTimes; ++i) {
      copy(out.view().slice(0, i * kRows, (i + 1) * kRows), x, stream);
    }
    return out;
  };
  const Tensor all_z = repeated(z), target = repeated(p.target), mask = repeated(p.mask),
               loss(single, {kTimes * kRows}, kGpu),
               all_dz(half, {kTimes * kRows, kVocabulary}, kGpu);
  cross_entropy({all_z, target, mask, loss, all_dz, 0}, stream);
  for (int64_t i = 0; i < kTimes; ++i) {
    const auto part = [&](const Tensor& x) {
      const TensorView there = x.view().slice(0, i * kRows, (i + 1) * kRows);
      Tensor out(there.dtype(), there.sizes());
      copy(out, there, stream);
      stream.synchronize();
      return out;
    };
    EXPECT_EQ(bytes_of(part(loss)), bytes_of(p.loss)) << i;
    EXPECT_TRUE(bytes_of(part(all_dz)) == bytes_of(dz)) << i;
  }
}

TEST_F(LossGpu, TargetsThatCannotBeGiveNan) {
  for (const int64_t vocabulary : {300, 20488, 102408, 204808}) {
    const Tensor z = normal_tensor(DType::kFloat32, {4, vocabulary}, 1), loss(DType::kFloat32, {4}),
                 dz(DType::kBFloat16, {4, vocabulary}),
                 target = int32_tensor({0, int32_t(vocabulary), -1, kIgnoredTarget});
    const Mirror m({z, loss, dz, target}, stream);
    cross_entropy({m(z), m(target), {}, m(loss), m(dz)}, stream);
    const Tensor losses = m.back(loss), gradient = m.back(dz);
    for (int64_t i = 0; i < 4 * vocabulary; ++i) {
      const int64_t n = i / vocabulary;
      const bool nan = n == 1 || n == 2;
      EXPECT_EQ(std::isnan(get(losses, n)), nan);
      ASSERT_EQ(std::isnan(get(gradient, i)), nan) << i;
      if (n == 3) {
        ASSERT_EQ(get(gradient, i), 0);
      }
    }
  }
}

}  // namespace
}  // namespace moiety::nn
