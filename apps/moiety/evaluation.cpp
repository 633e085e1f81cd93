#include "apps/moiety/evaluation.h"

#include <cmath>
#include <limits>
#include <numbers>

#include "apps/moiety/metrics.h"

namespace moiety::app {
namespace {

// Adds a batch to `total`, again until no rank loses pairs (where that is asked for).
void add_batch(RankModel& model, const Batch& batch, ExpertCapacity& capacity, Arena& arena,
               WeightGathering* gathering, const model::StepSums& sums, model::StepStats& total) {
  for (;;) {
    sums.clear(Stream());
    {
      const auto step = gathering ? gathering->begin_step("eval", 1) : std::nullopt;
      model.transformer().evaluate(model_batch(batch), capacity.rows(), sums, arena, Stream());
      if (gathering) gathering->flush();
      model.transformer().check_tokens();
    }
    const model::StepStats stats = sums.read();
    const int64_t required = lost_capacity(stats, model.world());
    if (required == 0 || !capacity.refuses_drops()) {
      total.add(stats);
      return;
    }
    capacity.grow(required);
  }
}

}  // namespace

model::Batch model_batch(const Batch& batch) {
  model::Batch out;
  out.token_BS = batch.token_BS;
  out.target_BS = batch.target_BS;
  out.position_BS = batch.position_BS;
  return out;
}

int64_t lost_capacity(const model::StepStats& stats, comm::Communicator& world) {
  int64_t required = stats.overflow() ? stats.required() : 0;
  world.all_reduce(TensorView(&required, DType::kInt64, {1}), comm::ReduceOp::kMax, Stream())
      .wait();
  return required;
}

EvaluationResult evaluate(RankModel& model, ValidationSet& samples, ExpertCapacity& capacity,
                          Arena& arena, WeightGathering* gathering) {
  const model::StepSums batch_sums = model.transformer().make_sums();
  model::StepStats stats;
  for (int64_t k = 0; k < samples.batches(); ++k) {
    add_batch(model, samples.batch(k), capacity, arena, gathering, batch_sums, stats);
  }
  double sums[2] = {stats.loss_sum, double(stats.targets)};
  model.world()
      .all_reduce(TensorView(sums, DType::kFloat64, {2}), comm::ReduceOp::kSum, Stream())
      .wait();
  EvaluationResult result;
  result.loss = sums[0] / sums[1];
  result.tokens = int64_t(sums[1]);
  const double bytes = samples.source_bytes();
  result.bits_per_byte =
      bytes > 0 ? sums[0] / (std::numbers::ln2 * bytes) : std::numeric_limits<double>::quiet_NaN();
  const Tensor pairs_LE = model.pairs_of_all_ranks(stats);
  for (int64_t l = 0; l < pairs_LE.view().size(0); ++l) {
    const int64_t experts = pairs_LE.view().size(1);
    result.balance.push_back(imbalance(pairs_LE.data<int64_t>() + l * experts, experts, experts));
  }
  return result;
}

}  // namespace moiety::app
