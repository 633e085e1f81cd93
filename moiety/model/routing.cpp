#include "moiety/model/routing.h"

#include <algorithm>

#include "moiety/base/trace.h"
#include "moiety/model/loss.h"
#include "moiety/moe/moe_layer.h"

namespace moiety::model {
namespace {

constexpr int64_t kInfoWords = 16;

// out = sum over the first dimension of x.
template <class T>
void sum_layers(TensorView x_LSE, TensorView out_SE) {
  const int64_t n = out_SE.numel();
  std::fill_n(out_SE.data<T>(), n, T(0));
  for (int64_t l = 0; l < x_LSE.size(0); ++l) {
    for (int64_t i = 0; i < n; ++i) out_SE.data<T>()[i] += x_LSE.data<T>()[l * n + i];
  }
}

int64_t count_targets(TensorView target_T, TensorView mask_T) {
  int64_t n = 0;
  for (int64_t t = 0; t < target_T.numel(); ++t) {
    const bool masked = mask_T.defined() && mask_T.data<uint8_t>()[t] == 0;
    n += !masked && target_T.data<int32_t>()[t] != kIgnoredTarget;
  }
  return n;
}

void add_layer(TensorView count_SE, const moe::MoeStats& now, MoeLayerStats& sum) {
  const int64_t experts = count_SE.size(1) - 1;
  sum.expert_pairs.resize(experts);
  for (int64_t s = 0; s < count_SE.size(0); ++s) {
    const int64_t* count = count_SE.data<int64_t>() + s * (experts + 1);
    for (int64_t e = 0; e < experts; ++e) sum.expert_pairs[e] += count[e];
  }
  sum.required = std::max(sum.required, now.required);
  sum.capacity = now.capacity;
  sum.dropped += now.dropped;
  sum.overflow = sum.overflow || now.overflow;
}

}  // namespace

Routing::Routing(const Config& c, const Pass& pass, TensorView target_T, TensorView mask_T)
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
  // Of the ranks that share the sequences one brings them to a sum over all ranks.
  pass.stream.run(
      [target_T, mask_T, own = own_scope_, scope = scope_, once = !global_ || pass.tp_rank() == 0] {
        own.data<int64_t>()[0] = count_targets(target_T, mask_T);
        own.data<int64_t>()[1] = target_T.numel();
        for (int i = 0; i < 2; ++i) scope.data<int64_t>()[i] = once ? own.data<int64_t>()[i] : 0;
      });
}

moe::RouterStats Routing::stats_of(int64_t index) const {
  return {.count = count_LSE_.select(index), .sum = sum_LSE_.select(index)};
}

TensorView Routing::loss_count(int64_t index) const {
  return pooled() ? pooled_count_SE_ : count_LSE_.select(index);
}

void Routing::count(StepStats& stats, comm::Communicator* world, Stream stream) {
  stream.run(
      [&stats, own = own_scope_, count_LSE = count_LSE_, info_LW = info_LW_, reports = reports()] {
        if (reports) {
          stats.targets += own.data<int64_t>()[0];
          stats.tokens += own.data<int64_t>()[1];
        }
        stats.moe.resize(count_LSE.size(0));
        for (int64_t l = 0; l < count_LSE.size(0); ++l) {
          add_layer(count_LSE.select(l), moe::moe_stats(info_LW.select(l)), stats.moe[l]);
        }
      });
  if (layers_ == 0) return;
  // A sequence lies on the ranks that share it: of its loss only the scope is summed over others.
  comm::Communicator* holders = global_ && !by_sequence() ? world : tp_;
  if (holders) {
    tickets_.push_back(holders->all_reduce(count_LSE_, comm::ReduceOp::kSum, stream));
    tickets_.push_back(holders->all_reduce(sum_LSE_, comm::ReduceOp::kSum, stream));
  }
  if (global_) tickets_.push_back(world->all_reduce(scope_, comm::ReduceOp::kSum, stream));
}

void Routing::losses(StepStats& stats, Stream stream) {
  if (layers_ == 0) return;
  {
    const WaitSpan wait(global_ ? TraceLane::kDp : TraceLane::kTp, "routing losses");
    for (comm::Ticket& ticket : tickets_) ticket.wait();
  }
  tickets_.clear();
  stream.run([loss_2 = loss_2_] { std::fill_n(loss_2.data<double>(), 2, 0.0); });
  if (pooled()) {
    stream.run([count = count_LSE_, sum = sum_LSE_, pooled_count = pooled_count_SE_,
                pooled_sum = pooled_sum_SE_] {
      sum_layers<int64_t>(count, pooled_count);
      sum_layers<double>(sum, pooled_sum);
    });
    moe::router_losses(
        router_, {.stats = {pooled_count_SE_, pooled_sum_SE_}, .scope = scope_, .loss_2 = loss_2_},
        stream);
  } else {
    for (int64_t l = 0; l < layers_; ++l) {
      moe::router_losses(router_, {.stats = stats_of(l), .scope = scope_, .loss_2 = loss_2_},
                         stream);
    }
  }
  // Where the sums are those of all ranks, this rank's part of the objective is its targets' share;
  // a rank's own sequences count with the targets of all.
  if (!reports()) return;
  stream.run([&stats, weight = by_sequence() ? scope_ : own_scope_, loss_2 = loss_2_] {
    const auto n = static_cast<double>(weight.data<int64_t>()[0]);
    stats.aux_sum += n * loss_2.data<double>()[0];
    stats.z_sum += n * loss_2.data<double>()[1];
  });
}

}  // namespace moiety::model
