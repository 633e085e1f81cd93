#include "moiety/train/step/tensor_check.h"

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "moiety/formats/bf16.h"

namespace moiety::train {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(TensorCheck, StatisticsLeaveOutWhatIsNotFinite) {
  std::vector<float> x{1, kNan, -3, kInf, 2, -kInf};
  const TensorStatistics s = tensor_statistics(TensorView(x.data(), DType::kFloat32, {2, 3}));
  EXPECT_EQ(s.tensor, "float32[2, 3]");
  EXPECT_EQ(s.elements, 6);
  EXPECT_EQ(s.nan, 1);
  EXPECT_EQ(s.infinite, 2);
  EXPECT_EQ(s.min, -3);
  EXPECT_EQ(s.max, 2);
  EXPECT_EQ(s.mean, 0);
  EXPECT_DOUBLE_EQ(s.rms, std::sqrt(14.0 / 3));
}

TEST(TensorCheck, TheFirstFindingIsKept) {
  std::vector<float> fine(12, 1), bad = fine;
  bad[7] = kInf;
  FirstNonFinite probe;
  probe.enter(2, false);
  probe.stored({"attention", "o", TensorView(fine.data(), DType::kFloat32, {3, 4}), {}});
  EXPECT_FALSE(probe.finding());
  const TensorView input(fine.data(), DType::kFloat32, {12});
  probe.stored({"attn.o", "x", TensorView(bad.data(), DType::kFloat32, {3, 4}), {input, {}}});
  bad[0] = kNan;
  probe.enter(3, true);
  probe.stored({"norm", "h", TensorView(bad.data(), DType::kFloat32, {3, 4}), {}});
  ASSERT_TRUE(probe.finding());
  const Finding& f = *probe.finding();
  EXPECT_EQ(f.order, 2);
  EXPECT_EQ(f.sentence(), "layer 2: attn.o (forward) stored inf at [1, 3] of x");
  EXPECT_EQ(f.inputs.size(), 1u);
  const auto json = nlohmann::json::parse(f.json().text());
  EXPECT_EQ(json["index"], nlohmann::json({1, 3}));
  EXPECT_EQ(json["value"], "inf");
  EXPECT_EQ(json["inputs"][0]["max"], 1.0);
}

TEST(TensorCheck, ViewsWithGapsAndShortFloats) {
  std::vector<bf16> x(24, bf16(1.0f));
  x[1] = bf16(kNan);  // in a gap
  x[2 * 8 + 4] = bf16(kNan);
  const std::array<int64_t, 2> sizes{3, 4}, strides{8, 2};
  FirstNonFinite probe;
  probe.stored({"rope", "q", TensorView(x.data(), DType::kBFloat16, sizes, strides), {}});
  ASSERT_TRUE(probe.finding());
  EXPECT_EQ(probe.finding()->index, (std::vector<int64_t>{2, 2}));
}

TEST(TensorCheck, RowsOfExperts) {
  // Two local experts, numbers 6 and 3: rows 0-1 and 4-5; the others hold nothing.
  std::vector<float> x(8 * 2, 0);
  x[2 * 2] = kNan;
  x[5 * 2 + 1] = kInf;
  std::vector<int64_t> begin{0, 4, 6}, count{2, 2};
  const std::vector<int32_t> experts{6, 3};
  const ExpertRows rows{TensorView(begin.data(), DType::kInt64, {3}),
                        TensorView(count.data(), DType::kInt64, {2}), experts};
  FirstNonFinite probe;
  probe.enter(1, true);
  probe.stored(
      {"experts.fc2", "dhidden", TensorView(x.data(), DType::kFloat32, {8, 2}), {}, &rows});
  ASSERT_TRUE(probe.finding());
  EXPECT_EQ(probe.finding()->sentence(),
            "layer 1, expert 3: experts.fc2 (backward) stored inf at [5, 1] of dhidden");
  EXPECT_EQ(probe.finding()->statistics.elements, 8);
  // A gradient [L, N, K] has a matrix for each.
  FirstNonFinite gradients;
  const ExpertRows own{{}, {}, experts};
  gradients.stored({"experts", "fc1", TensorView(x.data(), DType::kFloat32, {2, 4, 2}), {}, &own});
  EXPECT_EQ(gradients.finding()->expert, 6);
}

TEST(TensorCheck, WeightsAreNamedAsInACheckpoint) {
  optim::Parameter p;
  p.spec.name = "layers.4.attn.qkv.weight";
  p.spec.tensors = {{"layers.4.attn.q.weight", {4, 2}}, {"layers.4.attn.k.weight", {2, 2}}};
  p.spec.row_map = {{0, 0, 0, 2}, {2, 1, 0, 1}, {3, 0, 2, 2}, {5, 1, 1, 1}};
  p.spec.rows = 6;
  p.spec.row_elements = 2;
  p.spec.shape = {6, 2};
  std::vector<float> x(12, 0);
  x[4 * 2 + 1] = -kInf;
  p.weight = TensorView(x.data(), DType::kFloat32, {6, 2});
  FirstNonFinite probe;
  probe.look_at_weights(std::span(&p, 1));
  ASSERT_TRUE(probe.finding());
  EXPECT_EQ(probe.finding()->sentence(),
            "layer 4: weight layers.4.attn.q.weight is -inf at [3, 1]");
}

}  // namespace
}  // namespace moiety::train
