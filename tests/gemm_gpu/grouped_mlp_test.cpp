// The grouped MLP on a GPU against the CPU's reference: bit for bit with fp32 and on integers,
// close to it else; one captured graph for all routings; faults.
#include "moiety/base/graph.h"
#include "tests/gemm_gpu/mlp_there.h"
#include "tests/support/gpu_test.h"

namespace moiety::gemm {
namespace {

constexpr Activation kQGeGlu{ActivationKind::kGlu, 1.702f, 2, 1};

class GroupedMlpGpu : public GpuTest, public testing::WithParamInterface<GroupCase> {
 protected:
  // Bit for bit.
  void check(const GroupCase& c, MlpOptions o) {
    o.path = MlpPath::kReference;
    SCOPED_TRACE(
        text("{} maps {} biases {} D={} F={}", name(o.dtype), o.maps, o.biases, o.model, o.ffn));
    const MlpProblem p(c, o);
    const There there(p, stream);
    there.run();
    p.run();
    ASSERT_EQ(there.difference(), "");
  }
};

TEST_P(GroupedMlpGpu, HasTheBitsOfTheReference) {
  for (const bool maps : {false, true}) {
    for (const bool biases : {false, true}) {
      check(GetParam(),
            {.activation = biases ? kQGeGlu : swiglu(), .biases = biases, .maps = maps});
      check(GetParam(), {.activation = biases ? squared_relu() : clamped_swiglu(1),
                         .biases = biases,
                         .maps = maps,
                         .model = 19,
                         .ffn = 13});
      check(GetParam(), {.dtype = DType::kBFloat16,
                         .activation = squared_relu(),
                         .biases = biases,
                         .maps = maps,
                         .integers = true});
    }
  }
}

TEST_P(GroupedMlpGpu, Bf16IsCloseToTheReference) {
  // An activation without clamps, where a difference in the last place would switch a gradient off.
  constexpr Activation kOffset{ActivationKind::kGlu, 1.702f, swiglu().limit, 1};
  for (const Activation& activation : {swiglu(), kOffset, squared_relu()}) {
    const MlpProblem p(GetParam(), {.dtype = DType::kBFloat16,
                                    .path = MlpPath::kReference,
                                    .activation = activation,
                                    .biases = true,
                                    .maps = true,
                                    .model = 72,
                                    .ffn = 136});
    const There there(p, stream);
    there.run();
    p.run();
    for (const auto& [what, x] : p.results()) {
      ASSERT_EQ(far_rows(what, there.back(*x), *x, 0x1p-5), "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GroupedMlpGpu, testing::ValuesIn(mlp_cases()),
                         [](const auto& info) { return info.param.name; });

class GroupedMlpGpuParts : public GroupedMlpGpu {};

TEST_F(GroupedMlpGpuParts, ManyExpertsAndInterleave) {
  GroupCase many{"", std::vector<int64_t>(128), 3};
  for (size_t e = 0; e < 128; ++e) many.counts[e] = int64_t(e * 5 % 7);
  check(many, {.maps = true});
  check({"", {9, 0, 30}}, {.interleave = 8});
}

TEST_F(GroupedMlpGpuParts, HiddenAloneAndInPlaceOfItsGradient) {
  const MlpProblem p({"", {9, 0, 130}, 2}, {.path = MlpPath::kReference, .biases = true});
  There there(p, stream);
  grouped_mlp_hidden(there.mlp, there.input, there.gradients.h, stream);
  p.forward();
  EXPECT_TRUE(same_bits(there.back(p.h), p.h));
  there.forward();
  there.gradients.dh = there.gradients.h;
  there.backward_data();
  there.backward_weights();
  p.backward_data();
  p.backward_weights();
  EXPECT_TRUE(same_bits(there.back(p.h), p.dh));
  EXPECT_TRUE(same_bits(there.back(p.dx), p.dx));
  EXPECT_TRUE(same_bits(there.back(p.dw1), p.dw1));
}

TEST_F(GroupedMlpGpuParts, WeightGradientsAddAsTheDeviceSays) {
  const MlpProblem p({"", {9, 0, 130}}, {.path = MlpPath::kReference});
  const There there(p, stream);
  there.run();
  p.run();
  const Tensor one(DType::kFloat32, {1});
  put(one, 0, 1);
  const Mirror beta({one}, stream);
  there.backward_weights({.value = 0, .per_group = beta(one)});
  p.backward_weights(1);
  EXPECT_EQ(there.difference(), "");
}

TEST_F(GroupedMlpGpuParts, FaultsAreRecordedThere) {
  for (const bool index : {false, true}) {
    const MlpProblem p({"", {9, 4, 30}}, {.path = MlpPath::kReference, .maps = true});
    if (index) {
      p.source.data<int32_t>()[20] = int32_t(p.tokens);
      p.row.data<int32_t>()[4] = int32_t(p.groups.capacity()) + 7;
    } else {
      p.groups.count()[1] = -3;
    }
    const There there(p, stream);
    there.run();
    p.run();
    EXPECT_EQ(there.difference(), "");
    EXPECT_EQ(p.groups.status()[0], index ? kFaultIndex : kFaultGroup);
  }
}

TEST_F(GroupedMlpGpuParts, OneCaptureServesEveryRouting) {
  for (const bool maps : {false, true}) {
    MlpProblem p({"", {200, 0, 0, 100}}, {.path = MlpPath::kReference, .maps = maps});
    const There there(p, stream);
    const Graph graph(stream, [&] { there.run(); });
    for (const std::vector<int64_t>& split : std::vector<std::vector<int64_t>>{
             {0, 0, 0, 0}, {0, 300, 0, 0}, {1, 2, 3, 127}, {100, 50, 75, 75}}) {
      for (int64_t e = 0, row = 0; e < 4; ++e) {
        p.groups.begin()[e] = row;
        p.groups.count()[e] = split[e];
        p.groups.begin()[e + 1] = row += split[e];
      }
      if (maps) p.add_maps();
      fill_normal(p.x, uint32_t(split[1]));
      fill_normal(p.prob, uint32_t(split[3]));
      p.poison();
      for (const TensorView& x : {p.groups().begin_E1, p.groups().count_E, p.x.view(),
                                  p.prob.view(), p.source.view(), p.row.view()}) {
        there.upload(x);
      }
      for (const auto& [what, x] : p.results()) there.upload(*x);
      stream.synchronize();
      graph.launch(stream);
      p.run();
      EXPECT_EQ(there.difference(), "") << split[1];
    }
  }
}

TEST_F(GroupedMlpGpuParts, PathAndDeviceMustAgree) {
  const MlpProblem p({"", {4, 5}}, {});
  There there(p, stream);
  there.input.x = p.x;
  EXPECT_THROW(there.forward(), Error);
  there.mlp.path = MlpPath::kCpu;
  EXPECT_THROW(there.forward(), Error);
}

}  // namespace
}  // namespace moiety::gemm
