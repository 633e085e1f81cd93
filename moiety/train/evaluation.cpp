#include "moiety/train/evaluation.h"

#include <cmath>
#include <limits>
#include <numbers>

#include "moiety/train/metrics.h"
#include "moiety/train/step/step_feed.h"

namespace moiety::train {
namespace {

// The objects that the passes of an evaluation use.
struct Passes {
  RankModel& model;
  ExpertCapacity& capacity;
  Arena& arena;
  const Stream& stream;
  WeightGathering* gathering;
  BatchFeed batches;
  model::StepSums sums;
};

// Adds a batch to `total`, and repeats it until no rank loses pairs (if that is asked for).
void add_batch(Passes& p, const data::Batch& batch, model::StepStats& total) {
  model::Transformer& model = p.model.transformer();
  for (;;) {
    p.batches.put(batch, 0);
    p.sums.clear(p.stream);
    {
      const auto step = p.gathering ? p.gathering->begin_step("eval", 1) : std::nullopt;
      model.evaluate(p.batches.fetch(p.stream), p.capacity.rows(), p.sums, p.arena, p.stream);
      if (p.gathering) p.gathering->flush();
      model.check_tokens();
    }
    const model::StepStats stats = p.sums.read(p.stream);
    const int64_t required = lost_capacity(stats, p.model.world());
    if (required == 0 || !p.capacity.refuses_drops()) {
      total.add(stats);
      return;
    }
    p.capacity.grow(required);
    p.model.share_rows(p.capacity.rows(), p.arena);
  }
}

EvaluationLoss loss_of(std::string name, double sum, double targets, double bytes) {
  const double none = std::numeric_limits<double>::quiet_NaN();
  return {.name = std::move(name),
          .loss = sum / targets,
          .bits_per_byte = bytes > 0 ? sum / (std::numbers::ln2 * bytes) : none,
          .tokens = int64_t(targets)};
}

// The losses of the files over all ranks, and of all of them together.
EvaluationLoss losses_of(const std::vector<model::StepStats>& stats,
                         const data::ValidationSet& samples, comm::Communicator& world,
                         std::vector<EvaluationLoss>& files) {
  std::vector<double> sums;  // loss and targets of each
  for (const model::StepStats& file : stats) {
    sums.insert(sums.end(), {file.loss_sum, double(file.targets)});
  }
  world
      .all_reduce(TensorView(sums.data(), DType::kFloat64, {std::ssize(sums)}),
                  comm::ReduceOp::kSum, Stream())
      .wait();
  double sum = 0, targets = 0;
  for (int f = 0; f < samples.sources(); ++f) {
    const double* own = &sums[2 * size_t(f)];
    files.push_back(loss_of(samples.name(f), own[0], own[1], samples.source_bytes(f)));
    sum += own[0], targets += own[1];
  }
  return loss_of("", sum, targets, samples.source_bytes());
}

}  // namespace

int64_t lost_capacity(const model::StepStats& stats, comm::Communicator& world) {
  int64_t required = stats.overflow() ? stats.required() : 0;
  world.all_reduce(TensorView(&required, DType::kInt64, {1}), comm::ReduceOp::kMax, Stream())
      .wait();
  return required;
}

EvaluationResult evaluate(RankModel& model, data::ValidationSet& samples, ExpertCapacity& capacity,
                          Arena& arena, const Stream& stream, WeightGathering* gathering) {
  Passes passes{
      model,
      capacity,
      arena,
      stream,
      gathering,
      BatchFeed(samples.sequences(), samples.seq_len(), samples.parts(), 1, stream.device()),
      model.transformer().make_sums()};
  std::vector<model::StepStats> of_file(size_t(samples.sources()));
  for (int64_t k = 0; k < samples.batches(); ++k) {
    add_batch(passes, samples.batch(k), of_file[size_t(samples.source_of(k))]);
  }
  samples.await_checks();
  EvaluationResult result;
  model::StepStats stats;
  static_cast<EvaluationLoss&>(result) = losses_of(of_file, samples, model.world(), result.files);
  for (const model::StepStats& file : of_file) stats.add(file);
  const Tensor pairs_LE = model.pairs_of_all_ranks(stats);
  for (int64_t l = 0; l < pairs_LE.view().size(0); ++l) {
    const int64_t experts = pairs_LE.view().size(1);
    result.balance.push_back(imbalance(pairs_LE.data<int64_t>() + l * experts, experts, experts));
  }
  return result;
}

}  // namespace moiety::train
