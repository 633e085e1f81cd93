// Experts whose activations run beside their products have the bits of those that do not, in every
// tensor that they write, and write no row that is not alive.
#include "moiety/base/graph.h"
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

TEST_F(GroupedFusedGpuParts, WidthsOfModels) {
  const GroupCase few{"", {70, 5}, 3};
  for (const auto& [model, ffn] : {std::pair{40, 32}, std::pair{64, 768}, std::pair{7168, 256},
                                   std::pair{768, 2880}, std::pair{2880, 2880}}) {
    check(few, {.maps = ffn == 256, .model = model, .ffn = ffn});
  }
}

// All routings of a captured step are those of steps that are not, and take nothing of the host.
TEST_F(GroupedFusedGpuParts, OneCaptureServesFiftyRoutings) {
  constexpr int64_t kExperts = 5;
  for (const MlpPath path : {MlpPath::kSm90, MlpPath::kSm90Fused}) {
    MlpProblem p({"", {200, 0, 0, 100, 300}}, {.dtype = DType::kBFloat16,
                                               .path = MlpPath::kReference,
                                               .maps = true,
                                               .model = 72,
                                               .ffn = 136});
    const There replayed(p, path, stream), eager(p, path, stream);
    const Tensor beta(DType::kFloat32, {1});
    const Mirror there({beta}, stream);
    const auto step = [&](const There& x) {
      x.forward();
      x.backward_data();
      x.backward_weights({.value = 0, .per_group = there(beta)});
    };
    step(replayed);
    stream.synchronize();
    const Graph graph(stream, [&] { step(replayed); });
    for (int i = 0; i < 50; ++i) {
      for (int64_t e = 0, row = 0; e < kExperts; ++e) {
        int64_t rows = i < 3 ? 0 : (i * 37 + e * 91) % 121;
        if (i == 1 && e == 1) rows = 600;   // all to one
        if (i == 2 && e == 2) rows = 9000;  // over capacity
        p.groups.begin()[e] = row;
        p.groups.count()[e] = rows;
        p.groups.begin()[e + 1] = row = std::min<int64_t>(600, row + rows);
      }
      p.add_maps();
      fill_normal(p.x, uint32_t(i) + 10);
      fill_normal(p.prob, uint32_t(i) + 11);
      p.poison();
      put(beta, 0, i % 2);
      copy(there(beta), beta, stream);
      for (const There* x : {&replayed, &eager}) {
        for (const TensorView& t : {p.groups().begin_E1, p.groups().count_E, p.x.view(),
                                    p.prob.view(), p.source.view(), p.row.view()}) {
          x->upload(t);
        }
        for (const auto& [what, t] : p.results()) x->upload(*t);
      }
      stream.synchronize();
      const gpu::Activity before = gpu::activity();
      graph.launch(stream);
      step(eager);
      const gpu::Activity after = gpu::activity();
      EXPECT_EQ(after.allocations, before.allocations);
      EXPECT_EQ(after.waits, before.waits);
      for (const auto& [what, t] : p.results()) {
        if (!t->view().defined()) continue;
        ASSERT_EQ(difference(replayed.back(*t), eager.back(*t)), "") << what << ", replay " << i;
      }
    }
  }
}

}  // namespace
}  // namespace moiety::gemm
