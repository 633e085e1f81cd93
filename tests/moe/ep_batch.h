// One batch with its oracle, for tests that are about the order of operations, not their values.
#pragma once

#include <optional>

#include "tests/moe/ep_helpers.h"

namespace moiety::moe {

// bf16 inputs and expected outputs of all ranks; random routing, by default, without drops.
struct Batch {
  Batch(const ExpertMap& expert_map, const std::vector<int64_t>& tokens, int k, int64_t a,
        int64_t d, int seed, Routing routing = Routing::kSomeMasked)
      : map(expert_map), topk(k), alignment(a), model(d) {
    std::mt19937 rng(seed);
    const auto values = [&](const std::vector<int64_t>& rows) {
      ref::PerRank<bf16> out;
      for (const int64_t n : rows) {
        out.emplace_back();
        for (int64_t i = 0; i < n * model; ++i) {
          out.back().push_back(bf16(std::normal_distribution<float>()(rng)));
        }
      }
      return out;
    };
    const auto idx = make_routing(routing, tokens, topk, map, rng);
    for (int r = 0; r < map.ranks(); ++r) {
      capacity.push_back(worst_capacity(map.ranks(),
                                        *std::max_element(tokens.begin(), tokens.end()), topk,
                                        map.local_count(r), alignment, true));
    }
    plan = ref::make_plan({map, topk, alignment, capacity, idx}, capacity);
    x = values(tokens);
    g = values(tokens);
    y = values(capacity);
    for (const int64_t n : capacity) rows.emplace_back(n * model, poison<bf16>());
    gy = rows;
    ref::PerRank<float> none(map.ranks());
    ref::dispatch<bf16, float>(plan, model, x, nullptr, false, rows, none);
    ref::combine_backward<bf16, float>(plan, model, g, nullptr, nullptr, gy, none);
    out = ref::combine<bf16, float, bf16>(plan, model, y, nullptr, nullptr, Reduction::kRank);
  }

  ExpertMap map;
  int topk;
  int64_t alignment, model;
  std::vector<int64_t> capacity;
  ref::Plan plan;
  ref::PerRank<bf16> x, g, y;        // y serves as the gradient of rows, too
  ref::PerRank<bf16> rows, gy, out;  // expected
};

// A rank's part of a batch. Its memory must outlive the stream's work.
class BatchRun {
 public:
  BatchRun(const Batch& batch, int me)
      : b_(batch),
        me_(me),
        idx_(batch.plan.in.idx[me], batch.topk),
        x_(batch.x[me], batch.model),
        g_(batch.g[me], batch.model),
        y_(batch.y[me], batch.model),
        rows_(batch.capacity[me], batch.model),
        gy_(batch.capacity[me], batch.model),
        out_(batch.plan.in.tokens(me), batch.model),
        gx_(batch.plan.in.tokens(me), batch.model) {}

  void prepare_plan(EpGroup& group, Stream stream = {}) {
    const PrepareArgs args{
        .idx_TK = idx_.view(), .alignment = b_.alignment, .capacity = b_.capacity[me_]};
    if (!memory_) memory_.emplace(b_.map, group.limits(), args);
    plan = prepare(group, args, memory_->view(), stream);
  }
  void dispatch_rows(EpGroup& group, Stream stream = {}) {
    dispatch(group, plan, {.x_TD = x_.view(), .rows_CD = rows_.view()}, stream);
  }
  void combine_rows(EpGroup& group, Stream stream = {}) {
    combine(group, plan, {.y_CD = y_.view(), .out_TD = out_.view()}, stream);
  }
  void forward(EpGroup& group, Stream stream = {}) {
    prepare_plan(group, stream);
    dispatch_rows(group, stream);
    combine_rows(group, stream);
  }
  void combine_backward_rows(EpGroup& group, Stream stream = {}) {
    combine_backward(group, plan, {.g_TD = g_.view(), .gy_CD = gy_.view()}, stream);
  }
  void dispatch_backward_rows(EpGroup& group, Stream stream = {}) {
    dispatch_backward(group, plan, {.g_rows_CD = y_.view(), .gx_TD = gx_.view()}, stream);
  }
  void backward(EpGroup& group, Stream stream = {}) {
    combine_backward_rows(group, stream);
    dispatch_backward_rows(group, stream);
  }
  void expect_all(const std::string& what) const {
    expect_plan(plan, b_.plan, me_);
    rows_.expect(b_.rows[me_], false, what + " rows");
    out_.expect(b_.out[me_], false, what + " out");
    gy_.expect(b_.gy[me_], false, what + " gy");
    gx_.expect(b_.out[me_], false, what + " gx");
  }

  EpPlan plan;

 private:
  const Batch& b_;
  int me_;
  Mat<int64_t> idx_;
  Mat<bf16> x_, g_, y_, rows_, gy_, out_, gx_;
  std::optional<PlanMemory> memory_;
};

}  // namespace moiety::moe
