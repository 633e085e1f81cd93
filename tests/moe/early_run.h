// One rank's batch by prepare_dispatch, with weights, beside its oracle.
#pragma once

#include "moiety/moe/prepare_dispatch.h"
#include "tests/moe/ep_batch.h"

namespace moiety::moe {

// C may be short. Its tensors are copied to the place at the first run and come back by `expect`.
template <class Place = OnHost>
class EarlyRun {
 public:
  EarlyRun(const Batch& batch, int me, std::vector<int64_t> capacity, const Place& place = {})
      : b_(batch),
        me_(me),
        place_(place),
        capacity_(std::move(capacity)),
        idx_(batch.plan.in.idx[me], batch.topk),
        x_(batch.x[me], batch.model),
        rows_(capacity_[me], batch.model),
        w_(batch.plan.in.tokens(me), batch.topk),
        slot_w_(capacity_[me], 1) {
    for (int64_t t = 0; t < batch.plan.in.tokens(me); ++t) {
      for (int k = 0; k < batch.topk; ++k) w_.at(t, k) = weight(me, t, k);
    }
  }
  static float weight(int s, int64_t t, int k) { return float(100 * s + t) + 0.125f * float(k); }

  void run(EpGroup& group, OverflowPolicy overflow, const Stream& stream) {
    if (!memory_) place_all(group);
    args_.overflow = overflow;
    plan = prepare_dispatch(group, args_, rows_args_, memory_at_, stream);
  }
  void run(EpGroup& group) { run(group, OverflowPolicy::kError, place_.stream); }
  void expect(const std::string& what) {
    const ref::Plan expected =
        ref::make_plan({b_.map, b_.topk, b_.alignment, capacity_, b_.plan.in.idx}, capacity_);
    ref::PerRank<bf16> rows;
    ref::PerRank<float> w, slot_w;
    for (int r = 0; r < b_.map.ranks(); ++r) {
      rows.emplace_back(capacity_[r] * b_.model, poison<bf16>());
      slot_w.emplace_back(capacity_[r], poison<float>());
      auto& mine = w.emplace_back();
      for (int64_t t = 0; t < b_.plan.in.tokens(r); ++t) {
        for (int k = 0; k < b_.topk; ++k) mine.push_back(weight(r, t, k));
      }
    }
    ref::dispatch<bf16, float>(expected, b_.model, b_.x, &w, false, rows, slot_w);
    place_.back();
    expect_plan(place_.plan(plan), expected, me_);
    rows_.expect(rows[me_], false, what + " rows");
    slot_w_.expect(slot_w[me_], false, what + " slot_w");
  }

  EpPlan plan;

 private:
  void place_all(const EpGroup& group) {
    args_ = {.idx_TK = place_(idx_.storage(), idx_.view()),
             .alignment = b_.alignment,
             .capacity = capacity_[me_]};
    rows_args_ = {.x_TD = place_(x_.storage(), x_.view()),
                  .w_TK = place_(w_.storage(), w_.view()),
                  .rows_CD = place_(rows_.storage(), rows_.view()),
                  .slot_w = place_(slot_w_.storage(), slot_w_.vector())};
    memory_.emplace(b_.map, group.limits(), args_);
    memory_at_ = place_(memory_->view(), memory_->view());
  }

  const Batch& b_;
  int me_;
  Place place_;
  std::vector<int64_t> capacity_;
  Mat<int64_t> idx_;
  Mat<bf16> x_, rows_;
  Mat<float> w_, slot_w_;
  std::optional<PlanMemory> memory_;
  TensorView memory_at_;
  PrepareArgs args_;
  DispatchArgs rows_args_;
};

}  // namespace moiety::moe
