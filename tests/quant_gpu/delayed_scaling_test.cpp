// Delayed scaling on a GPU against the CPU, step by step.
#include "moiety/quant/delayed_scaling.h"

#include "moiety/base/graph.h"
#include "tests/quant/partial_cast_harness.h"
#include "tests/quant_gpu/gpu_cases.h"

namespace moiety::quant {
namespace {

constexpr int64_t kTensors = 70;

// The states of some tensors on a device, one array of each kind for all of them.
struct States {
  States(int64_t length, Device device)
      : history(DType::kFloat32, {kTensors, length}, device),
        position(DType::kInt32, {kTensors}, device),
        scale(DType::kFloat32, {kTensors}, device),
        scale_inv(DType::kFloat32, {kTensors}, device),
        step_amax(DType::kFloat32, {kTensors}, device),
        flags(DType::kUInt32, {kTensors}, device) {
    const Stream stream = Stream::on(device);
    Tensor ones(DType::kFloat32, {kTensors});
    std::fill_n(ones.data<float>(), kTensors, 1.0f);
    copy(scale, ones, stream);
    copy(scale_inv, ones, stream);
    stream.synchronize();
  }
  DelayedScaling state(int64_t i) const {
    const auto one = [i](const Tensor& x) { return x.view().slice(0, i, i + 1); };
    return {history.view().select(i), one(position), one(scale), one(scale_inv), one(step_amax)};
  }
  DelayedScalingTable table(AmaxAlgorithm algorithm, int margin) const {
    std::vector<DelayedScalingItem> items;
    for (int64_t i = 0; i < kTensors; ++i) {
      const TensorView flag = i % 5 == 0 ? TensorView() : flags.view().slice(0, i, i + 1);
      items.push_back({state(i), i % 2 ? DType::kE5M2 : DType::kE4M3, flag});
    }
    return DelayedScalingTable(items, algorithm, margin);
  }

  Tensor history, position, scale, scale_inv, step_amax, flags;
};

// Maxima of a step: most of them plain, some 0, some of random bits, infinities and NaN among them.
Tensor step_maxima(int step) {
  Tensor out(DType::kFloat32, {kTensors});
  for (int64_t i = 0; i < kTensors; ++i) {
    const uint64_t z = mix(static_cast<uint64_t>(i), static_cast<uint64_t>(step));
    float amax = 1.0f + static_cast<float>(z >> 40) * 0x1p-20f;
    if (z % 8 == 5) amax = std::bit_cast<float>(static_cast<uint32_t>(z >> 32) & 0x7FFFFFFFu);
    if (z % 8 == 6) amax = std::numeric_limits<float>::infinity();
    if (z % 8 == 7) amax = 0;
    out.data<float>()[i] = amax;
  }
  return out;
}

class DelayedScalingGpu : public QuantGpuTest {
 protected:
  void expect_same(const States& gpu, const States& cpu, int step) {
    for (const auto x : {&States::history, &States::position, &States::scale, &States::scale_inv,
                         &States::step_amax, &States::flags}) {
      ASSERT_EQ(difference("state", to_host(gpu.*x, stream), cpu.*x), "") << "step " << step;
    }
  }
};

struct Setting {
  int64_t length;
  AmaxAlgorithm algorithm;
  int margin, steps;
};
constexpr Setting kSettings[] = {{1024, AmaxAlgorithm::kMax, 0, 300},
                                 {16, AmaxAlgorithm::kMax, 1, 300},
                                 {1, AmaxAlgorithm::kMax, -2, 100},
                                 {7, AmaxAlgorithm::kNewest, 3, 100}};

TEST_F(DelayedScalingGpu, StepsEqualTheCpu) {
  for (const Setting& s : kSettings) {
    const States gpu(s.length, kGpu), cpu(s.length, {});
    const DelayedScalingTable gpu_table = gpu.table(s.algorithm, s.margin),
                              cpu_table = cpu.table(s.algorithm, s.margin);
    EXPECT_NE(gpu_table.device(), nullptr);
    for (int step = 0; step < s.steps; ++step) {
      const Tensor maxima = step_maxima(step);
      copy(gpu.step_amax, maxima, stream);
      copy(cpu.step_amax, maxima, Stream());
      update_delayed_scales(gpu_table, stream);
      update_delayed_scales(cpu_table, Stream());
      ASSERT_NO_FATAL_FAILURE(expect_same(gpu, cpu, step));
    }
  }
}

TEST_F(DelayedScalingGpu, HistoryOldestFirst) {
  const States gpu(1000, kGpu), cpu(1000, {});
  const Tensor gpu_out(DType::kFloat32, {1000}, kGpu), cpu_out(DType::kFloat32, {1000});
  Tensor history(DType::kFloat32, {kTensors, 1000}), position(DType::kInt32, {kTensors});
  fill(history, Data::kNormal, 1);
  for (int64_t i = 0; i < kTensors; ++i) position.data<int32_t>()[i] = int32_t(i * 14);
  for (const States* s : {&gpu, &cpu}) {
    const Stream on = s == &gpu ? stream : Stream();
    copy(s->history, history, on);
    copy(s->position, position, on);
  }
  for (int64_t i = 0; i < kTensors; ++i) {
    oldest_first(gpu.state(i), gpu_out, stream);
    oldest_first(cpu.state(i), cpu_out, Stream());
    ASSERT_EQ(difference("history", to_host(gpu_out, stream), cpu_out), "") << i;
  }
}

// Two ranks whose maxima are reduced as int32, in a graph that is captured once: both have the
// states of one rank that saw everything.
TEST_F(DelayedScalingGpu, TwoRanksInACapturedGraph) {
  const States first(32, kGpu), second(32, kGpu), cpu(32, {});
  const DelayedScalingTable first_table = first.table(AmaxAlgorithm::kMax, 0),
                            second_table = second.table(AmaxAlgorithm::kMax, 0),
                            cpu_table = cpu.table(AmaxAlgorithm::kMax, 0);
  const Graph graph(stream, [&] {
    update_delayed_scales(first_table, stream);
    update_delayed_scales(second_table, stream);
  });
  EXPECT_EQ(graph.nodes(), 2);
  for (int step = 0; step < 100; ++step) {
    Tensor reduced = step_maxima(2 * step);
    const Tensor other = step_maxima(2 * step + 1);
    for (int64_t i = 0; i < kTensors; ++i) {
      auto& bits = reinterpret_cast<int32_t&>(reduced.data<float>()[i]);
      bits = std::max(bits, std::bit_cast<int32_t>(other.data<float>()[i]));
    }
    copy(first.step_amax, reduced, stream);
    copy(second.step_amax, reduced, stream);
    copy(cpu.step_amax, reduced, Stream());
    graph.launch(stream);
    update_delayed_scales(cpu_table, Stream());
    ASSERT_NO_FATAL_FAILURE(expect_same(first, cpu, step));
    ASSERT_NO_FATAL_FAILURE(expect_same(second, cpu, step));
  }
}

TEST_F(DelayedScalingGpu, AllArraysAreOnTheStreamsDevice) {
  const States gpu(4, kGpu), cpu(4, {});
  DelayedScalingItem item{gpu.state(0)};
  item.state.scale = cpu.state(0).scale;
  const auto make = [&] { DelayedScalingTable(std::span(&item, 1)); };
  EXPECT_NE(kind_and_error_of(make).find("float32[1] is on cpu, others on cuda:0"),
            std::string::npos);
  item = {gpu.state(0)};
  const DelayedScalingTable table(std::span(&item, 1));
  EXPECT_NE(kind_and_error_of([&] { update_delayed_scales(table, Stream()); }).find("cuda:0"),
            std::string::npos);
}

}  // namespace
}  // namespace moiety::quant
