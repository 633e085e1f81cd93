// Experts whose activations run beside their products have the bits of those that do not, in every
// tensor that they write, and write no row that is not alive.
#include "tests/gemm_gpu/bounds.h"
#include "tests/gemm_gpu/mlp_there.h"
#include "tests/support/gpu_test.h"

namespace moiety::gemm {
namespace {

constexpr Activation kQGeGlu{ActivationKind::kGlu, 1.702f, 2, 1};

std::vector<GroupCase> cases() {
  std::vector<GroupCase> out = mlp_cases();
  out.push_back({"fused_one_token", {0, 1, 0}, 2});
  out.push_back({"fused_all_to_one", {0, 700, 0, 0}});
  out.push_back({"fused_mixed", {300, 0, 1, 64, 129, 65, 63, 200}, 5});
  GroupCase many{"fused_e300", std::vector<int64_t>(300), 1};  // more than a warp has lanes
  for (size_t e = 0; e < many.counts.size(); ++e) many.counts[e] = int64_t(e * 5 % 7);
  out.push_back(many);
  return out;
}

class GroupedFusedGpu : public GpuTest, public testing::WithParamInterface<GroupCase> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;  // there is no GPU
    const GpuProperties& gpu = gpu_properties(0);
    if (gpu.major != 9) GTEST_SKIP() << gpu.name << " is no Hopper";
  }

  void check(const GroupCase& c, MlpOptions o, bool in_place = false, bool with_prob = true) {
    o.dtype = DType::kBFloat16;
    o.path = MlpPath::kReference;
    SCOPED_TRACE(text("maps {} biases {} D={} F={} kind {}", o.maps, o.biases, o.model, o.ffn,
                      int(o.activation.kind)));
    const MlpProblem p(c, o);
    There apart(p, MlpPath::kSm90, stream), fused(p, MlpPath::kSm90Fused, stream);
    for (There* there : {&apart, &fused}) {
      if (!with_prob) there->input.prob_R = {};
      there->forward();
    }
    ASSERT_EQ(difference(fused.back(p.h), apart.back(p.h)), "") << "H";
    for (There* there : {&apart, &fused}) {
      if (in_place) there->gradients.dh = there->gradients.h;
      there->backward_data();
      there->backward_weights();
    }
    for (const auto& [what, x] : p.results()) {
      if (!x->view().defined()) continue;
      ASSERT_EQ(difference(fused.back(*x), apart.back(*x)), "") << what;
    }
  }
};

TEST_P(GroupedFusedGpu, HasTheBitsOfSeparateSteps) {
  for (const auto& [model, ffn] :
       {std::pair{64, 256}, std::pair{72, 136}, std::pair{200, 328}, std::pair{24, 8}}) {
    for (const Activation& activation : {swiglu(), kQGeGlu, squared_relu()}) {
      const bool biases = activation.alpha != 1 || ffn == 328;
      check(GetParam(), {.activation = activation,
                         .biases = biases,
                         .maps = ffn == 136 || ffn == 256,
                         .model = model,
                         .ffn = ffn});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GroupedFusedGpu, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

class GroupedFusedGpuParts : public GroupedFusedGpu {};

TEST_F(GroupedFusedGpuParts, InPlaceAndWithoutProbabilities) {
  const GroupCase large{"", {300, 0, 1, 64, 129, 65, 63, 200}, 5};
  check(large, {.model = 136, .ffn = 264}, true);
  check(large, {.maps = true, .model = 136, .ffn = 264}, true);
  check(large, {.activation = clamped_swiglu(0.5f), .model = 64, .ffn = 64}, false, false);
}

TEST_F(GroupedFusedGpuParts, ManyTilesABlockGiveTheSameBitsAgain) {
  const GroupCase hot{"", {3000, 700, 9000}};
  for (int i = 0; i < 3; ++i) {
    check(hot, {.maps = i == 1, .model = 1088, .ffn = 1024});
  }
}

}  // namespace
}  // namespace moiety::gemm
