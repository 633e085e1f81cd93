// main_grad in bf16: every contribution is that of fp32, rounded once when it is added.
#include "moiety/formats/bf16.h"
#include "moiety/model/precision.h"
#include "tests/model/harness.h"
#include "tests/model/model_cases.h"

namespace moiety::model {
namespace {

struct Training {
  ModelCase c;
  DType storage = DType::kFloat32;
  std::optional<RecipeKind> recipe = {};
};

// The gradients that so many micro-batches leave in `dtype`: their sum, or that of only the last.
std::vector<std::vector<double>> gradients_of(const Training& run, DType dtype, int64_t batches,
                                              bool accumulate) {
  std::vector<std::vector<double>> all;
  on_ranks(1, [&](comm::Communicator& world) {
    const Config& c = run.c.config;
    ModelHarness h(c, run.storage, world, run.c.sequences * run.c.seq_len);
    std::vector<Tensor> memory;
    for (optim::Parameter& p : h.parameters) {
      p.grad = memory.emplace_back(dtype, p.spec.shape);
      fill_normal(p.grad, 2);  // the first contribution overwrites
    }
    h.model->bind(h.parameters);
    Precision precision;
    if (run.recipe) precision.recipe = make_recipe(*run.recipe);
    precision.seed = 17;
    h.model->set_precision(precision);
    for (int64_t b = 0; b < batches; ++b) {
      const TestBatch batch(c, run.c.sequences, run.c.seq_len, run.c.documents, unsigned(5 + b));
      Batch next = batch.batch;
      next.micro_step = uint64_t(b);
      for (optim::Parameter& p : h.parameters) p.overwrite = b == 0 || !accumulate;
      h.step(next);
    }
    for (const optim::Parameter& p : h.parameters) all.push_back(values(p.grad));
  });
  return all;
}

void expect_one_rounding(const Training& run) {
  const auto first = gradients_of(run, DType::kFloat32, 1, false),
             second = gradients_of(run, DType::kFloat32, 2, false),
             narrow = gradients_of(run, DType::kBFloat16, 1, false),
             sum = gradients_of(run, DType::kBFloat16, 2, true);
  for (size_t p = 0; p < first.size(); ++p) {
    for (size_t i = 0; i < first[p].size(); ++i) {
      const auto once = static_cast<float>(bf16(static_cast<float>(first[p][i])));
      ASSERT_EQ(narrow[p][i], once) << run.c.name << " parameter " << p << " element " << i;
      const auto twice = static_cast<float>(bf16(once + static_cast<float>(second[p][i])));
      ASSERT_EQ(sum[p][i], twice) << run.c.name << " parameter " << p << " element " << i;
    }
  }
}

TEST(NarrowGradients, AreRoundedOnceAContribution) {
  for (const ModelCase& c : model_cases()) {
    if (c.config.tie_embeddings) continue;  // two contributions a micro-batch
    expect_one_rounding({c});
    expect_one_rounding({c, DType::kBFloat16});
  }
}

TEST(NarrowGradients, OfRecipesToo) {
  const ModelCase c = model_case("all_kinds", [](Config& config) {
    config.layers = 2;
    config.dense_layers = {0};
    config.d_ffn_dense = 48;
    config.shared_d_ffn = 16;
    config.shared_gate = true;
    config.loss_chunk = 5;
  });
  for (const RecipeKind kind :
       {RecipeKind::kFp8Tensor, RecipeKind::kFp8Block, RecipeKind::kMxfp8, RecipeKind::kNvfp4}) {
    expect_one_rounding({c, DType::kBFloat16, kind});
  }
}

// The head's contribution comes before the embedding's.
TEST(NarrowGradients, OfTiedTablesAreNearThoseOfFp32) {
  const Training run{model_case("tied", [](Config& c) { c.tie_embeddings = true; })};
  const auto wide = gradients_of(run, DType::kFloat32, 2, true),
             narrow = gradients_of(run, DType::kBFloat16, 2, true);
  for (size_t p = 0; p < wide.size(); ++p) {
    double scale = 0;
    for (const double v : wide[p]) scale = std::max(scale, std::abs(v));
    for (size_t i = 0; i < wide[p].size(); ++i) {
      ASSERT_NEAR(narrow[p][i], wide[p][i], 4 * scale / 256) << p << " element " << i;
    }
  }
}

}  // namespace
}  // namespace moiety::model
