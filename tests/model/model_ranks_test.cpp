// Several ranks (threads): the sum of their gradients is that of one rank with the whole batch, if
// the routing losses are taken over all of it.
#include "tests/model/model_cases.h"
#include "tests/model/ranked_model.h"

namespace moiety::model {
namespace {

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

Config config_of(const RanksCase& ranks) {
  Config c = small_config();
  c.aux_scope = AuxScope::kGlobal;
  c.router.aux = ranks.aux;
  c.router.z_coef = 0.05f;
  c.shared_d_ffn = 8;
  return c;
}

void expect_sum(const Config& c, const RanksCase& ranks) {
  expect_equal(run_ranked(c, {}, 4, 10),
               run_ranked(c, {.ranks = ranks.ranks, .ep = ranks.ep}, 4, 10), 2e-5);
}

TEST_P(ModelRanks, SumToOneRank) { expect_sum(config_of(GetParam()), GetParam()); }

TEST_P(ModelRanks, SumToOneRankWithBiasesOfExperts) {
  Config c = config_of(GetParam());
  take_gpt_oss_experts(c);
  c.glu_interleave = 8;
  c.indexed_experts = true;
  expect_sum(c, GetParam());
}

}  // namespace
}  // namespace moiety::model
