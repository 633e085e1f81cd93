// The same documents packed into few sequences and each in a sequence of its own with padding: one
// loss, gradient and choice of experts.
#include <numeric>
#include <random>

#include "tests/model/model_cases.h"
#include "tests/model/ranked_model.h"

namespace moiety::model {
namespace {

struct Rows {
  Rows(int64_t sequences, int64_t seq_len)
      : token(DType::kInt32, {sequences, seq_len}),
        target(DType::kInt32, {sequences, seq_len}),
        position(DType::kInt32, {sequences, seq_len}),
        routed(DType::kUInt8, {sequences, seq_len}) {
    for (int64_t t = 0; t < sequences * seq_len; ++t) {
      token.data<int32_t>()[t] = 0;
      target.data<int32_t>()[t] = -100;
      position.data<int32_t>()[t] = 0;
      routed.data<uint8_t>()[t] = 0;
    }
    batch.token_BS = token;
    batch.target_BS = target;
    batch.position_BS = position;
    batch.routed_BS = routed;
  }
  // Document d, whose tokens and targets are functions of d: some have no target.
  void put(int64_t sequence, int64_t at, int d, int64_t length) {
    std::mt19937 random(static_cast<unsigned>(d));
    for (int64_t i = 0; i < length; ++i) {
      const int64_t t = sequence * token.view().size(1) + at + i;
      token.data<int32_t>()[t] = static_cast<int32_t>(random() % 40);
      const auto target_id = static_cast<int32_t>(random() % 40);
      target.data<int32_t>()[t] = i + 1 == length || random() % 4 == 0 ? -100 : target_id;
      position.data<int32_t>()[t] = static_cast<int32_t>(i);
      routed.data<uint8_t>()[t] = 1;
    }
  }
  Tensor token, target, position, routed;
  Batch batch;
};

constexpr int64_t kLengths[] = {5, 3, 7, 1, 4}, kSeqLen = 12, kTokens = 20;

Rows packed_rows() {
  Rows rows(2, kSeqLen);
  rows.put(0, 0, 2, 7);
  rows.put(0, 7, 0, 5);
  rows.put(1, 0, 4, 4);
  rows.put(1, 4, 1, 3);
  rows.put(1, 7, 3, 1);
  return rows;
}

Rows padded_rows() {
  Rows rows(5, kSeqLen);
  for (int d = 0; d < 5; ++d) rows.put(d, 0, d, kLengths[d]);
  return rows;
}

struct Result {
  StepStats stats;
  Weights gradients;
};

Result step_of(const Config& c, const Rows& rows) {
  Result out;
  on_ranks(1, [&](comm::Communicator& world) {
    ModelHarness h(c, DType::kFloat32, world, rows.token.view().numel(), &world);
    out = {h.step(rows.batch), h.gradients()};
  });
  return out;
}

class PackedDocuments : public testing::TestWithParam<ModelCase> {};
INSTANTIATE_TEST_SUITE_P(
    Models, PackedDocuments,
    testing::Values(model_case("all_layers", [](Config& c) { take_all_kinds_of_layers(c); }),
                    model_case("hf", [](Config& c) { c.router.aux = moe::AuxLoss::kHf; }),
                    model_case("sigmoid",
                               [](Config& c) {
                                 c.router.score = moe::Score::kSigmoid;
                                 c.router.z_coef = 0.1f;
                                 c.tie_embeddings = true;
                               }),
                    model_case("recomputed", [](Config& c) { c.recompute = Recompute::kFull; }),
                    model_case("gpt_oss", [](Config& c) { take_gpt_oss_experts(c); })),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(PackedDocuments, LearnWhatPaddedOnesDo) {
  const Config& c = GetParam().config;
  const Result packed = step_of(c, packed_rows()), padded = step_of(c, padded_rows());
  EXPECT_EQ(packed.stats.tokens, kTokens);
  EXPECT_EQ(padded.stats.tokens, kTokens);
  EXPECT_EQ(packed.stats.targets, padded.stats.targets);
  EXPECT_NEAR(packed.stats.loss_sum, padded.stats.loss_sum, 1e-6 * padded.stats.loss_sum);
  EXPECT_NEAR(packed.stats.aux_sum, padded.stats.aux_sum, 1e-6 * padded.stats.aux_sum);
  EXPECT_NEAR(packed.stats.z_sum, padded.stats.z_sum, 1e-6 * padded.stats.z_sum);
  for (size_t l = 0; l < packed.stats.moe.size(); ++l) {
    const auto& pairs = packed.stats.moe[l].expert_pairs;
    EXPECT_EQ(pairs, padded.stats.moe[l].expert_pairs);
    EXPECT_EQ(std::accumulate(pairs.begin(), pairs.end(), int64_t{0}), kTokens * c.router.top_k);
  }
  for (const auto& [name, expected] : padded.gradients) {
    const std::vector<double>& got = packed.gradients.at(name);
    ASSERT_EQ(got.size(), expected.size());
    double scale = 0;
    for (const double g : expected) scale = std::max(scale, std::abs(g));
    EXPECT_GT(scale, 0) << name;
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], expected[i], 1e-6 * scale + 1e-7) << name << " " << i;
    }
  }
}

// Padding alone: a micro-batch without a target changes nothing, and is no NaN.
TEST(PackedDocuments, NothingButPadding) {
  Config c = small_config();
  take_all_kinds_of_layers(c);
  const Result result = step_of(c, Rows(2, kSeqLen));
  EXPECT_EQ(result.stats.tokens, 0);
  EXPECT_EQ(result.stats.targets, 0);
  EXPECT_EQ(result.stats.loss_sum, 0);
  EXPECT_EQ(result.stats.aux_sum, 0);
  EXPECT_EQ(result.stats.z_sum, 0);
  for (const auto& [name, gradient] : result.gradients) {
    for (const double g : gradient) ASSERT_EQ(g, 0) << name;
  }
}

}  // namespace
}  // namespace moiety::model
