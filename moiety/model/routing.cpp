#include "moiety/model/routing.h"

#include "moiety/base/copy.h"
#include "moiety/base/trace.h"
#include "moiety/model/routing_sums.h"

namespace moiety::model {
namespace {

constexpr int64_t kInfoWords = 16;

}  // namespace

Routing::Routing(const Config& c, const Pass& pass, const Counted& counted)
    : router_(c.router),
      global_(c.aux_scope == AuxScope::kGlobal),
      tp_(pass.tp),
      layers_(c.moe_layers()),
      info_LW_(pass.arena.tensor(DType::kInt64, {layers_, kInfoWords})),
      scope_(pass.arena.tensor(DType::kInt64, {2})),
      own_scope_(pass.arena.tensor(DType::kInt64, {2})),
      loss_2_(pass.arena.tensor(DType::kFloat64, {2})) {
  const int64_t segments = router_.aux == moe::AuxLoss::kSequence ? pass.sequences : 1;
  const int64_t columns = router_.experts + 1;
  count_LSE_ = pass.arena.tensor(DType::kInt64, {layers_, segments, columns});
  sum_LSE_ = pass.arena.tensor(DType::kFloat64, {layers_, segments, columns});
  pooled_count_SE_ = pass.arena.tensor(DType::kInt64, {segments, columns});
  pooled_sum_SE_ = pass.arena.tensor(DType::kFloat64, {segments, columns});
  // One of the ranks that share the sequences brings their targets to a sum over all ranks.
  count_targets({.target_T = counted.target_T,
                 .mask_T = counted.mask_T,
                 .own_2 = own_scope_,
                 .scope_2 = scope_,
                 .in_scope = !global_ || pass.tp_rank() == 0,
                 .routed_T = counted.routed_T},
                pass.stream);
}

moe::RouterStats Routing::stats_of(int64_t index) const {
  return {.count = count_LSE_.select(index), .sum = sum_LSE_.select(index)};
}

TensorView Routing::loss_count(int64_t index) const {
  return pooled() ? pooled_count_SE_ : count_LSE_.select(index);
}

void Routing::count(const StepSums& sums, comm::Communicator* world, Stream stream) {
  add_counts({.own_2 = reports() ? own_scope_ : TensorView(),
              .count_LSE = count_LSE_,
              .info_LW = info_LW_},
             sums, stream);
  if (layers_ == 0) return;
  // A sequence lies on the ranks that share it: only the scope of its loss is summed over others.
  comm::Communicator* holders = global_ && !by_sequence() ? world : tp_;
  if (holders) {
    tickets_.push_back(holders->all_reduce(count_LSE_, comm::ReduceOp::kSum, stream));
    tickets_.push_back(holders->all_reduce(sum_LSE_, comm::ReduceOp::kSum, stream));
  }
  if (global_) tickets_.push_back(world->all_reduce(scope_, comm::ReduceOp::kSum, stream));
}

void Routing::losses(const StepSums& sums, Stream stream) {
  if (layers_ == 0) return;
  {
    const WaitSpan wait(global_ ? TraceLane::kDp : TraceLane::kTp, "routing losses");
    for (comm::Ticket& ticket : tickets_) ticket.wait();
  }
  tickets_.clear();
  fill_bytes(loss_2_, 0, stream);
  if (pooled()) {
    sum_layers(count_LSE_, pooled_count_SE_, stream);
    sum_layers(sum_LSE_, pooled_sum_SE_, stream);
    moe::router_losses(
        router_, {.stats = {pooled_count_SE_, pooled_sum_SE_}, .scope = scope_, .loss_2 = loss_2_},
        stream);
  } else {
    for (int64_t l = 0; l < layers_; ++l) {
      moe::router_losses(router_, {.stats = stats_of(l), .scope = scope_, .loss_2 = loss_2_},
                         stream);
    }
  }
  // If the sums are those of all ranks, this rank's part of the objective is its targets' share; a
  // rank's own sequences count with the targets of all.
  if (!reports()) return;
  add_routing_losses(by_sequence() ? scope_ : own_scope_, loss_2_, sums, stream);
}

}  // namespace moiety::model
