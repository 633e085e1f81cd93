// The sums that passes add to those of a step, checked by hand.
#include "moiety/model/routing_sums.h"

#include "moiety/moe/prepare.h"
#include "tests/support/tensors.h"

namespace moiety::model {
namespace {

TEST(RoutingSums, CountTargetsThatAreValid) {
  const Tensor target = int32_tensor({5, -100, 0, 7, -100}), own(DType::kInt64, {2});
  const Tensor mask(DType::kUInt8, {5}), scope(DType::kInt64, {2});
  std::fill_n(mask.data<uint8_t>(), 5, 1);
  mask.data<uint8_t>()[3] = 0;
  const auto count = [&](const TensorView& m, bool in_scope) {
    count_targets({target, m, own, scope, in_scope}, Stream());
    return std::vector<int64_t>{own.data<int64_t>()[0], own.data<int64_t>()[1],
                                scope.data<int64_t>()[0], scope.data<int64_t>()[1]};
  };
  EXPECT_EQ(count({}, true), (std::vector<int64_t>{3, 5, 3, 5}));
  EXPECT_EQ(count(mask, true), (std::vector<int64_t>{2, 5, 2, 5}));
  EXPECT_EQ(count(mask, false), (std::vector<int64_t>{2, 5, 0, 0}));
  // Padding is no token.
  count_targets({target, {}, own, scope, true, mask}, Stream());
  EXPECT_EQ(scope.data<int64_t>()[0], 3);
  EXPECT_EQ(scope.data<int64_t>()[1], 4);
}

TEST(RoutingSums, LayersOverMicroBatches) {
  const StepSums sums(2, 3);
  const Tensor own(DType::kInt64, {2}), count(DType::kInt64, {2, 2, 4}),
      info(DType::kInt64, {2, 16});
  for (int64_t i = 0; i < 16; ++i) count.data<int64_t>()[i] = i;
  own.data<int64_t>()[0] = 3;
  own.data<int64_t>()[1] = 5;
  for (const int64_t required : {9, 4}) {
    int64_t* word = info.data<int64_t>() + 16;
    word[moe::kInfoGroupRequired] = required;
    word[moe::kInfoCapacity] = 2 * required;
    word[moe::kInfoGroupDropped] = 1;
    word[moe::kInfoGroupOverflow] = required == 9;
    add_counts({own, count, info}, sums, Stream());
  }
  add_counts({{}, count, info}, sums, Stream());
  const StepStats stats = sums.read();
  EXPECT_EQ(stats.targets, 6);
  EXPECT_EQ(stats.tokens, 10);
  EXPECT_EQ(stats.moe[0].expert_pairs, (std::vector<int64_t>{3 * 4, 3 * 6, 3 * 8}));
  EXPECT_EQ(stats.moe[1].expert_pairs, (std::vector<int64_t>{3 * 20, 3 * 22, 3 * 24}));
  EXPECT_EQ(stats.moe[1].required, 9);
  EXPECT_EQ(stats.moe[1].capacity, 8);
  EXPECT_EQ(stats.moe[1].dropped, 3);
  EXPECT_TRUE(stats.moe[1].overflow && !stats.moe[0].overflow);
  StepStats twice = stats;
  twice.add(stats);
  EXPECT_EQ(twice.tokens, 20);
  EXPECT_EQ(twice.moe[0].expert_pairs, (std::vector<int64_t>{24, 36, 48}));
  EXPECT_EQ(twice.moe[1].dropped, 6);
  sums.clear(Stream());
  EXPECT_EQ(sums.read().moe[1].expert_pairs, std::vector<int64_t>(3));
}

TEST(RoutingSums, LossesInLanes) {
  // Lane 0 has 2^53, 1 and 1, which are lost one by one; lane 1 has 1 and 1, which are not.
  const Tensor loss(DType::kFloat32, {2 * kLossLanes + 1});
  float* x = loss.data<float>();
  x[0] = 0x1p53f;
  x[kLossLanes] = x[2 * kLossLanes] = x[1] = x[kLossLanes + 1] = 1;
  const StepSums sums(0, 8);
  add_losses(loss, sums, Stream());
  EXPECT_EQ(sums.read().loss_sum, 0x1p53 + 2);
  add_losses(loss.view().slice(0, 1, 2), sums, Stream());
  EXPECT_EQ(sums.read().loss_sum, 0x1p53 + 4) << "rounded to even";
  const Tensor weight(DType::kInt64, {2}), two(DType::kFloat64, {2});
  weight.data<int64_t>()[0] = 4;
  two.data<double>()[0] = 0.5;
  two.data<double>()[1] = 3;
  for (int i = 0; i < 2; ++i) add_routing_losses(weight, two, sums, Stream());
  EXPECT_EQ(sums.read().aux_sum, 4);
  EXPECT_EQ(sums.read().z_sum, 24);
}

}  // namespace
}  // namespace moiety::model
