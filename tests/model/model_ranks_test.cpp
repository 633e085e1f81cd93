// Several ranks (threads): the sum of their gradients is that of one rank with the whole batch, if
// the routing losses are taken over all of it.
#include <mutex>

#include "tests/model/harness.h"
#include "tests/model/model_cases.h"

namespace moiety::model {
namespace {

struct Result {
  StepStats stats;
  Weights gradients;
};

void add(Result& total, const StepStats& s, const Weights& gradients) {
  total.stats.loss_sum += s.loss_sum;
  total.stats.aux_sum += s.aux_sum;
  total.stats.z_sum += s.z_sum;
  total.stats.targets += s.targets;
  total.stats.moe.resize(s.moe.size());
  for (size_t l = 0; l < s.moe.size(); ++l) {
    std::vector<int64_t>& pairs = total.stats.moe[l].expert_pairs;
    pairs.resize(s.moe[l].expert_pairs.size());
    for (size_t e = 0; e < pairs.size(); ++e) pairs[e] += s.moe[l].expert_pairs[e];
  }
  for (const auto& [name, g] : gradients) {
    std::vector<double>& sum = total.gradients[name];
    if (sum.size() < g.size()) sum.resize(g.size());
    for (size_t i = 0; i < g.size(); ++i) sum[i] += g[i];
  }
}

// `ranks` data ranks that share the batch, `ep` of them an expert-parallel group.
Result run(const Config& config, int ranks, int ep) {
  Result total;
  std::mutex mutex;
  on_ranks(ranks, [&](comm::Communicator& world) {
    const int64_t sequences = 4 / ranks;
    const TestBatch batch(config, 4, 10, false, 1);
    const auto experts = world.split(world.rank() / ep, world.rank(), "ep");
    ModelHarness h(config, DType::kFloat32, *experts, sequences * 10, &world);
    const StepStats stats =
        h.step(batch.part(world.rank() * sequences, (world.rank() + 1) * sequences));
    const std::lock_guard lock(mutex);
    add(total, stats, h.gradients());
  });
  return total;
}

struct RanksCase {
  const char* name;
  int ranks, ep;
  moe::AuxLoss aux;
};
class ModelRanks : public testing::TestWithParam<RanksCase> {};
INSTANTIATE_TEST_SUITE_P(Layouts, ModelRanks,
                         testing::Values(RanksCase{"dp2_switch", 2, 1, moe::AuxLoss::kSwitch},
                                         RanksCase{"ep2_hf", 2, 2, moe::AuxLoss::kHf},
                                         RanksCase{"dp2_sequence", 2, 1, moe::AuxLoss::kSequence},
                                         RanksCase{"ep2_sequence", 2, 2, moe::AuxLoss::kSequence},
                                         RanksCase{"dp2_ep2_hf", 4, 2, moe::AuxLoss::kHf},
                                         RanksCase{"ep4_switch", 4, 4, moe::AuxLoss::kSwitch}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(ModelRanks, SumToOneRank) {
  Config c = small_config();
  c.aux_scope = AuxScope::kGlobal;
  c.router.aux = GetParam().aux;
  c.router.z_coef = 0.05f;
  c.shared_d_ffn = 8;
  const Result one = run(c, 1, 1), many = run(c, GetParam().ranks, GetParam().ep);
  EXPECT_EQ(many.stats.targets, one.stats.targets);
  EXPECT_NEAR(many.stats.loss_sum, one.stats.loss_sum, 1e-5 * one.stats.loss_sum);
  EXPECT_NEAR(many.stats.aux_sum, one.stats.aux_sum, 1e-5 * one.stats.aux_sum);
  EXPECT_NEAR(many.stats.z_sum, one.stats.z_sum, 1e-5 * one.stats.z_sum);
  for (size_t l = 0; l < one.stats.moe.size(); ++l) {
    EXPECT_EQ(many.stats.moe[l].expert_pairs, one.stats.moe[l].expert_pairs);
  }
  ASSERT_EQ(many.gradients.size(), one.gradients.size());
  for (const auto& [name, g] : one.gradients) {
    double scale = 0;
    for (const double v : g) scale = std::max(scale, std::abs(v));
    ASSERT_EQ(many.gradients.at(name).size(), g.size()) << name;
    for (size_t i = 0; i < g.size(); ++i) {
      ASSERT_NEAR(many.gradients.at(name)[i], g[i], 2e-5 * scale) << name << " element " << i;
    }
  }
}

}  // namespace
}  // namespace moiety::model
