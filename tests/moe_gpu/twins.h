// Batches that go forward and back on CPU ranks, and the same ones on GPUs.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <random>

#include "moiety/moe/combine.h"
#include "moiety/moe/dispatch.h"
#include "tests/moe_gpu/ranks_on_gpu.h"

namespace moiety::moe {

// One rank's tensors of a batch that goes forward and back, on either device.
struct Step {
  static constexpr int64_t kTokens = 300, kModel = 40, kCapacity = 4000;
  static constexpr int kRanks = 3, kTopk = 4, kExperts = 7;
  static constexpr EpLimits kLimits{.tokens = kTokens, .model = kModel, .topk = kTopk};
  static ExpertMap map() { return {kExperts, kRanks}; }

  explicit Step(int seed) {
    std::mt19937 random(seed);
    for (int64_t i = 0; i < kTokens * kTopk; ++i) {
      idx.data<int32_t>()[i] = static_cast<int32_t>(random() % (kExperts + 1)) - 1;
    }
    for (const Tensor* x : {&x_in, &g}) {
      for (int64_t i = 0; i < kTokens * kModel; ++i) {
        x->data<bf16>()[i] = bf16(std::normal_distribution<float>()(random));
      }
    }
  }
  std::vector<const Tensor*> all() const {
    return {&idx, &x_in, &g, &rows, &gy, &out, &gx, &memory};
  }
  // `at` says where a tensor is.
  template <class At>
  void prepare_plan(EpGroup& group, const At& at, const Stream& stream) {
    const PrepareArgs args{.idx_TK = at(idx), .alignment = 8, .capacity = kCapacity};
    plan = prepare(group, args, at(memory), stream);
  }
  template <class At>
  void forward(EpGroup& group, const At& at, const Stream& stream) {
    dispatch(group, plan, {.x_TD = at(x_in), .rows_CD = at(rows)}, stream);
    combine(group, plan, {.y_CD = at(rows), .out_TD = at(out)}, stream);
  }
  template <class At>
  void backward(EpGroup& group, const At& at, const Stream& stream) {
    combine_backward(group, plan, {.g_TD = at(g), .gy_CD = at(gy)}, stream);
    dispatch_backward(group, plan, {.g_rows_CD = at(gy), .gx_TD = at(gx)}, stream);
  }
  void expect_same(const Step& other) const {
    const auto same = [](const Tensor& a, const Tensor& b) {
      const auto bytes = static_cast<size_t>(a.view().bytes());
      return std::memcmp(a.view().raw(), b.view().raw(), bytes) == 0;
    };
    EXPECT_TRUE(same(rows, other.rows));
    EXPECT_TRUE(same(out, other.out));
    EXPECT_TRUE(same(gy, other.gy));
    EXPECT_TRUE(same(gx, other.gx));
  }

  Tensor idx{DType::kInt32, {kTokens, kTopk}};
  Tensor x_in{DType::kBFloat16, {kTokens, kModel}}, g{DType::kBFloat16, {kTokens, kModel}};
  Tensor rows{DType::kBFloat16, {kCapacity, kModel}}, gy{DType::kBFloat16, {kCapacity, kModel}};
  Tensor out{DType::kBFloat16, {kTokens, kModel}}, gx{DType::kBFloat16, {kTokens, kModel}};
  Tensor memory{
      DType::kUInt8,
      {plan_bytes(map(), kLimits, {.idx_TK = idx, .alignment = 8, .capacity = kCapacity})}};
  EpPlan plan;
};

// Steps on CPU ranks, and the same on the GPU.
struct Twins {
  Twins(comm::Communicator& world, OnGpuRank& place) {
    for (int i = 0; i < 3; ++i) {
      expected.emplace_back(std::make_unique<Step>(3 * world.rank() + i));
      got.emplace_back(std::make_unique<Step>(3 * world.rank() + i));
      for (const Tensor* x : got.back()->all()) there[x] = place(*x, *x);
    }
    place.stream.synchronize();
    EpGroup cpu = EpGroup::create(world, Step::map(), Step::kLimits, {.name = "cpu"});
    const auto here = [](const Tensor& x) -> TensorView { return x; };
    for (auto& step : expected) {
      step->prepare_plan(cpu, here, {});
      step->forward(cpu, here, {});
      step->backward(cpu, here, {});
    }
    cpu.close();
  }
  auto at() const {
    return [this](const Tensor& x) { return there.at(&x); };
  }
  void expect_same(OnGpuRank& place) {
    place.back();
    for (size_t i = 0; i < got.size(); ++i) got[i]->expect_same(*expected[i]);
  }
  // F0 F1 B0 F2 B1 B2, where F and B are all operations of a direction.
  void run(EpGroup& group, const Stream& stream) {
    const auto forward = [&](int i) {
      got[i]->prepare_plan(group, at(), stream);
      got[i]->forward(group, at(), stream);
    };
    forward(0);
    forward(1);
    got[0]->backward(group, at(), stream);
    forward(2);
    got[1]->backward(group, at(), stream);
    got[2]->backward(group, at(), stream);
  }

  std::vector<std::unique_ptr<Step>> expected, got;
  std::map<const Tensor*, TensorView> there;
};

}  // namespace moiety::moe
