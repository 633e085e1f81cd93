#include "moiety/quant/delayed_scaling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/formats/e5m2.h"
#include "moiety/formats/quantized.h"
#include "tests/quant/partial_cast_harness.h"
#include "tests/support/bits.h"

namespace moiety::quant {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct State {
  explicit State(int64_t length) : history(length) {}
  State(const State&) = delete;
  std::vector<float> history;
  int32_t position = 0;
  float scale = 1, scale_inv = 1, step_amax = 0;
  uint32_t flags = 0;

  DelayedScaling view() {
    return {TensorView(history.data(), DType::kFloat32, {int64_t(history.size())}),
            TensorView(&position, DType::kInt32, {1}), TensorView(&scale, DType::kFloat32, {1}),
            TensorView(&scale_inv, DType::kFloat32, {1}),
            TensorView(&step_amax, DType::kFloat32, {1})};
  }
  DelayedScalingItem item(DType element = DType::kE4M3) {
    return {view(), element, TensorView(&flags, DType::kUInt32, {1})};
  }
};

void step(State& state, float amax, AmaxAlgorithm algorithm = AmaxAlgorithm::kMax, int margin = 0,
          DType element = DType::kE4M3) {
  state.step_amax = amax;
  const DelayedScalingItem item = state.item(element);
  const DelayedScalingTable table(std::span(&item, 1), algorithm, margin);
  update_delayed_scales(table, Stream());
}

TEST(DelayedScaling, ByHand) {
  State s(3);
  step(s, 7.0f);
  EXPECT_EQ(s.scale, 64.0f);
  EXPECT_EQ(s.scale_inv, 0x1p-6f);
  EXPECT_EQ(s.step_amax, 0.0f);
  EXPECT_EQ(s.position, 1);
  step(s, 3.5f);  // the maximum is still 7
  EXPECT_EQ(s.scale, 64.0f);
  step(s, 1.75f);
  EXPECT_EQ(s.position, 0);
  step(s, 0.875f);  // 7 has left
  EXPECT_EQ(s.history, (std::vector<float>{0.875f, 3.5f, 1.75f}));
  EXPECT_EQ(s.scale, 128.0f);
}

TEST(DelayedScaling, NewestAndMargin) {
  State s(4);
  step(s, 7.0f, AmaxAlgorithm::kNewest);
  step(s, 3.5f, AmaxAlgorithm::kNewest);
  EXPECT_EQ(s.scale, 128.0f);
  step(s, 3.5f, AmaxAlgorithm::kNewest, 2);
  EXPECT_EQ(s.scale, 32.0f);
  step(s, 3.5f, AmaxAlgorithm::kNewest, -1, DType::kE5M2);
  EXPECT_EQ(s.scale, 2 * 57344.0f / 3.5f);
}

TEST(DelayedScaling, ZeroAndNonFiniteStepsChangeNothing) {
  State s(2);
  step(s, 7.0f);
  for (const float amax : {0.0f, kInfinity, std::bit_cast<float>(0x7FFFFFFFu)}) {
    s.flags = 0;
    step(s, amax);
    EXPECT_EQ(s.history, (std::vector<float>{7.0f, 0.0f}));
    EXPECT_EQ(s.position, 1);
    EXPECT_EQ(s.scale, 64.0f);
    EXPECT_EQ(s.scale_inv, 0x1p-6f);
    EXPECT_EQ(s.step_amax, 0.0f);
    EXPECT_EQ(s.flags, amax == 0 ? 0u : kFlagNonFinite);
  }
}

TEST(DelayedScaling, TinyAmaxGivesTheLargestScale) {
  State s(1);
  step(s, std::bit_cast<float>(1u));
  EXPECT_EQ(bits_of(s.scale), 0x7F7FFFFFu);
  EXPECT_EQ(bits_of(s.scale_inv), 0x00200000u);
  step(s, 3.0f);  // a history of one value keeps the newest
  EXPECT_EQ(s.scale, 448.0f / 3.0f);
}

// A step that is skipped leaves everything but step_amax, which belongs to it.
TEST(DelayedScaling, SkippedStepsAreForgotten) {
  State s(3);
  step(s, 7.0f);
  const DelayedScalingItem item = s.item();
  const DelayedScalingTable table(std::span(&item, 1));
  Tensor skip(DType::kInt32, {1});
  for (const float amax : {100.0f, kInfinity}) {
    s.step_amax = amax;
    *skip.data<int32_t>() = 5;
    update_delayed_scales(table, Stream(), skip);
    EXPECT_EQ(s.history, (std::vector<float>{7.0f, 0.0f, 0.0f}));
    EXPECT_EQ(s.position, 1);
    EXPECT_EQ(s.scale, 64.0f);
    EXPECT_EQ(s.step_amax, 0.0f);
    EXPECT_EQ(s.flags, 0u);
  }
  s.step_amax = 14.0f;
  *skip.data<int32_t>() = 0;
  update_delayed_scales(table, Stream(), skip);
  EXPECT_EQ(s.scale, 32.0f);
  EXPECT_THROW(update_delayed_scales(table, Stream(), Tensor(DType::kInt32, {2})), Error);
}

TEST(DelayedScaling, ScalesFollowFromAHistory) {
  State s(3);
  s.scale = 9;
  scale_from_history(s.view(), DType::kE4M3);
  EXPECT_EQ(s.scale, 1.0f);
  EXPECT_EQ(s.scale_inv, 1.0f);
  s.history = {0.0f, 3.5f, 1.75f};
  scale_from_history(s.view(), DType::kE4M3);
  EXPECT_EQ(s.scale, 128.0f);
  EXPECT_EQ(s.scale_inv, 0x1p-7f);
  scale_from_history(s.view(), DType::kE5M2, 1);
  EXPECT_EQ(s.scale, 57344.0f / 2 / 3.5f);
  EXPECT_THROW(scale_from_history(s.view(), DType::kE2M1), Error);
}

// Many tensors over 3000 steps against a list that grows.
TEST(DelayedScaling, LongRunEqualsAPlainLoop) {
  constexpr int kSteps = 3000;
  struct Setting {
    int64_t length;
    AmaxAlgorithm algorithm;
    int margin;
  };
  for (const Setting setting :
       {Setting{1024, AmaxAlgorithm::kMax, 0}, Setting{16, AmaxAlgorithm::kMax, 1},
        Setting{1, AmaxAlgorithm::kMax, 0}, Setting{7, AmaxAlgorithm::kNewest, 3}}) {
    constexpr int kTensors = 40;
    std::vector<std::unique_ptr<State>> states;
    std::vector<DelayedScalingItem> items;
    for (int i = 0; i < kTensors; ++i) {
      states.push_back(std::make_unique<State>(setting.length));
      items.push_back(states.back()->item(i % 2 ? DType::kE5M2 : DType::kE4M3));
    }
    const DelayedScalingTable table(items, setting.algorithm, setting.margin);
    std::vector<std::vector<float>> pushed(kTensors);
    for (int t = 0; t < kSteps; ++t) {
      for (int i = 0; i < kTensors; ++i) {
        const uint64_t z = mix(i, t);
        float amax = std::bit_cast<float>(static_cast<uint32_t>(z >> 32) & 0x7FFFFFFFu);
        if (z % 8 < 5) amax = 1.0f + static_cast<float>(z >> 40) * 0x1p-20f;
        if (z % 8 == 7) amax = 0;
        states[i]->step_amax = amax;
        if (amax > 0 && std::isfinite(amax)) pushed[i].push_back(amax);
      }
      update_delayed_scales(table, Stream());
      for (int i = 0; i < kTensors; ++i) {
        const State& s = *states[i];
        ASSERT_EQ(s.step_amax, 0.0f);
        if (pushed[i].empty()) continue;
        const auto& list = pushed[i];
        const auto window = std::min<int64_t>(setting.length, list.size());
        const float a = setting.algorithm == AmaxAlgorithm::kNewest
                            ? list.back()
                            : *std::max_element(list.end() - window, list.end());
        const float target = (i % 2 ? 57344.0f : 448.0f) / static_cast<float>(1 << setting.margin);
        const float scale = std::min(target / a, 3.4028235e38f);
        ASSERT_EQ(bits_of(s.scale), bits_of(scale)) << "step " << t << " tensor " << i;
        ASSERT_EQ(bits_of(s.scale_inv), bits_of(1.0f / scale));
      }
    }
  }
}

// A state restored from its history, oldest first, goes on with the same scales.
TEST(DelayedScaling, Checkpoint) {
  State a(5);
  for (int t = 0; t < 13; ++t) step(a, 1.0f + static_cast<float>(mix(1, t) % 1000));
  State b(5);
  oldest_first(a.view(), b.view().history, Stream());
  EXPECT_EQ(b.history.back(), a.history[(a.position + 4) % 5]);
  b.scale = a.scale;
  b.scale_inv = a.scale_inv;
  for (int t = 0; t < 20; ++t) {
    const float amax = static_cast<float>(1 + mix(2, t) % 500);
    step(a, amax);
    step(b, amax);
    EXPECT_EQ(a.scale, b.scale) << t;
  }
}

// step_amax reduced over two ranks as int32: both then have the scale of one that saw everything.
TEST(DelayedScaling, TwoRanks) {
  State whole(4), first(4), second(4);
  for (int t = 0; t < 50; ++t) {
    const float x = 0.5f + static_cast<float>(mix(3, t) % 100);
    const float y = t % 9 == 4 ? kInfinity : static_cast<float>(mix(4, t) % 100);
    const int32_t reduced = std::max(std::bit_cast<int32_t>(x), std::bit_cast<int32_t>(y));
    step(first, std::bit_cast<float>(reduced));
    step(second, std::bit_cast<float>(reduced));
    step(whole, std::max(x, y));
    EXPECT_EQ(first.scale, whole.scale);
    EXPECT_EQ(second.scale, whole.scale);
    EXPECT_EQ(first.history, whole.history);
  }
  EXPECT_EQ(first.flags, kFlagNonFinite);
}

TEST(DelayedScaling, ArgumentsAreChecked) {
  State s(2);
  DelayedScalingItem item = s.item();
  EXPECT_THROW(DelayedScalingTable(std::span(&item, 1), AmaxAlgorithm::kMax, 65), Error);
  item.element = DType::kE2M1;
  EXPECT_THROW(DelayedScalingTable(std::span(&item, 1)), Error);
  item = s.item();
  item.state.history = TensorView(s.history.data(), DType::kFloat32, {0});
  EXPECT_THROW(DelayedScalingTable(std::span(&item, 1)), Error);
  item = s.item();
  item.state.position = TensorView(&s.scale, DType::kFloat32, {1});
  EXPECT_THROW(DelayedScalingTable(std::span(&item, 1)), Error);
}

}  // namespace
}  // namespace moiety::quant
