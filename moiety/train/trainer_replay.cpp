// The replay of the step that the guard halted at: the same weights, which the step did not change,
// the same data and random numbers, and a look at every tensor that is stored.
#include "moiety/base/copy.h"
#include "moiety/base/crc32c.h"
#include "moiety/checkpoint/together.h"
#include "moiety/train/failure_file.h"
#include "moiety/train/step/replay.h"
#include "moiety/train/trainer.h"

namespace moiety::train {

// A checksum of this rank's losses and of its gradients before they are summed over ranks.
uint32_t Trainer::checksum(const model::StepStats& stats) {
  const double losses[] = {stats.loss_sum, stats.aux_sum, stats.z_sum};
  uint32_t sum = crc32c(losses, sizeof losses);
  for (const optim::Parameter& p : learner_.optimizer.parameters()) {
    if (!p.trained()) continue;
    const Tensor grad = to_host(p.grad, learner_.stream);
    sum = crc32c(grad.view().raw(), static_cast<size_t>(grad.view().bytes()), sum);
  }
  return sum;
}

std::string Trainer::replay(const FinishedStep& done) {
  say(LogLevel::kInfo, "step {} is replayed with a look at every tensor", step());
  const Heartbeat::Aside aside(heartbeat_, "replay");
  RankReplay own;
  own.first = checksum(done.stats);
  if (done.found) own.before = done.found->sentence();

  learner_.optimizer.complete_weights(learner_.stream);
  FirstNonFinite probe(learner_.stream);
  probe.look_at_weights(learner_.optimizer.parameters());
  own.again = checksum(pipeline_.repeat_passes(done.start, probe));
  const optim::StepReport again = pipeline_.repeat_update();

  if (const auto& finding = probe.finding()) {
    own.order = finding->order;
    own.finding = finding->sentence();
  }
  std::vector<RankReplay> ranks;
  for (const std::string& part : checkpoint::gather(world_.bootstrap(), to_json(own))) {
    ranks.push_back(parse_rank_replay(part));
  }
  const std::string verdict = replay_verdict(ranks, again.bad_parameter);

  const optim::StepReport& report = done.report;
  JsonLine fields;
  fields.add("verdict", verdict)
      .add("skipped_in_row", report.skips_in_row)
      .add("bad_values", report.bad)
      .add("bad_parameter", report.bad_parameter)
      .add("bad_rank", report.bad_rank)
      .add("loss", report.losses[0] / double(report.tokens))
      .add("checksum", text("{:08x}", own.first))
      .add("checksum_of_replay", text("{:08x}", own.again));
  if (done.found) fields.raw("found_in_step", done.found->json().text());
  if (probe.finding()) fields.append(probe.finding()->json());
  write_failure(config().run.dir, "nan", world_.rank(), step(), fields);
  return verdict;
}

}  // namespace moiety::train
