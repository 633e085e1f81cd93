// The step that the guard halted at, once more: same weights, which the step did not change, same
// data, same random numbers, and a look at every tensor that is stored.
#include "moiety/base/copy.h"
#include "moiety/base/crc32c.h"
#include "moiety/checkpoint/together.h"
#include "moiety/train/failure_file.h"
#include "moiety/train/trainer.h"

namespace moiety::app {

// Of this rank's losses and of its gradients before they are summed over ranks.
uint32_t Trainer::checksum() {
  const double losses[] = {stats_.loss_sum, stats_.aux_sum, stats_.z_sum};
  uint32_t sum = crc32c(losses, sizeof losses);
  for (const optim::Parameter& p : optimizer_.parameters()) {
    const Tensor grad = to_host(p.grad, stream_);
    sum = crc32c(grad.view().raw(), static_cast<size_t>(grad.view().bytes()), sum);
  }
  return sum;
}

std::string Trainer::replay(const optim::StepReport& report) {
  say(LogLevel::kInfo, "step {} is replayed with a look at every tensor", step_);
  const Heartbeat::Aside aside(heartbeat_, "replay");
  RankReplay own;
  own.first = checksum();
  if (found_) own.before = found_->sentence();

  FirstNonFinite probe;
  probe.look_at_weights(optimizer_.parameters());
  start_data(&step_start_);
  made_step_ = step_;
  feed_batch(0);
  model_.transformer().set_probe(&probe);
  enqueue_passes(true);
  model_.transformer().set_probe(nullptr);
  stats_ = sums_.read(stream_);
  own.again = checksum();
  // The optimizer is halted: it measures and changes nothing.
  feed_update();
  enqueue_update();
  stream_.synchronize();
  const optim::StepReport again = read_report(enqueued_);

  if (const auto& finding = probe.finding()) {
    own.order = finding->order;
    own.finding = finding->sentence();
  }
  std::vector<RankReplay> ranks;
  for (const std::string& part : checkpoint::gather(world_.bootstrap(), to_json(own))) {
    ranks.push_back(parse_rank_replay(part));
  }
  const std::string verdict = replay_verdict(ranks, again.bad_parameter);

  JsonLine fields;
  fields.add("verdict", verdict)
      .add("skipped_in_row", report.skips_in_row)
      .add("bad_values", report.bad)
      .add("bad_parameter", report.bad_parameter)
      .add("bad_rank", report.bad_rank)
      .add("loss", report.losses[0] / double(report.tokens))
      .add("checksum", text("{:08x}", own.first))
      .add("checksum_of_replay", text("{:08x}", own.again));
  if (found_) fields.raw("found_in_step", found_->json().text());
  if (probe.finding()) fields.append(probe.finding()->json());
  write_failure(options().run.dir, "nan", world_.rank(), step_, fields);
  return verdict;
}

}  // namespace moiety::app
