// The report on a step, and the end of a bad run.
#include <algorithm>
#include <cmath>

#include "moiety/base/error.h"
#include "moiety/train/trainer.h"

namespace moiety::train {

StepRecord Trainer::record_of(const FinishedStep& done, int64_t dropped) const {
  const optim::StepReport& report = done.report;
  const double targets = double(report.tokens);
  StepRecord r;
  r.step = step();
  r.steps = plan_.steps;
  r.tokens = trained_tokens_;
  r.loss = report.losses[0] / targets;
  r.aux = report.losses[1] / targets;
  // "hf" is one loss over all layers, the others are one of each layer.
  const bool each = config().model.router.aux != moe::AuxLoss::kHf;
  r.aux_of_layer = r.aux / double(each ? std::max<int64_t>(config().model.moe_layers(), 1) : 1);
  r.z = report.losses[2] / targets;
  r.grad_norm = report.norm;
  r.lr = report.lr;
  r.recipe = name(learner_.recipe);
  r.dropped = dropped;
  r.skipped = report.skip;
  if (plan_.device.type == DeviceType::kCuda) {
    r.activity = {done.activity.allocations, done.activity.waits};
  }
  const int64_t experts = config().model.router.experts, layers = config().model.moe_layers();
  for (int64_t l = 0; l < layers; ++l) {
    const int64_t* pairs = done.stats.moe[l].expert_pairs.data();
    r.balance.push_back(imbalance(pairs, experts, experts));
    r.rank_balance.push_back(imbalance(pairs, experts, plan_.grid.ep));
    r.entropy += balance_entropy(pairs, experts) / double(layers);
  }
  return r;
}

void Trainer::report_step(const FinishedStep& done) {
  // Every rank of an expert-parallel group counts the group's dropped pairs; only its first rank
  // reports them.
  int64_t dropped = 0;
  if (world_.rank() % plan_.grid.ep == 0) {
    for (const model::MoeLayerStats& layer : done.stats.moe) dropped += layer.dropped;
  }
  struct Sums {
    int64_t dropped, ns, tokens;
    PeerWaits waits;
  } sums{dropped, std::llround(1e9 * done.seconds), done.stats.tokens, done.waits};
  constexpr int64_t kSums = sizeof(Sums) / sizeof(int64_t);
  world_.all_reduce(TensorView(&sums, DType::kInt64, {kSums}), comm::ReduceOp::kSum, Stream())
      .wait();
  Observer* const observer = journal_.observer();
  if (!observer) return;
  const model::Config& c = config().model;
  const double tokens = double(config().step_tokens());
  const double per_token =
      model::flops_per_token(c, config().data.seq_len, config().log.causal_flops);
  const double flops = per_token * tokens - model::flops_per_pair(c) * double(sums.dropped);
  // Shares are of all ranks' time in a step, since ranks begin and end it at slightly different
  // times.
  WaitTimes waits;
  for (size_t a = 0; a < kWaitAxes.size(); ++a) {
    waits.ms[a] =
        1e3 * done.seconds * double(sums.waits.ns[a]) / double(std::max<int64_t>(sums.ns, 1));
  }
  StepRecord record = record_of(done, sums.dropped);
  if (config().data.pack == data::Pack::kDocuments) record.fill = double(sums.tokens) / tokens;
  observer->step(record, {.seconds = done.seconds,
                          .tokens = tokens,
                          .flops = flops / world_.size(),
                          .data_wait_ms = done.data_wait_ms,
                          .waits = waits});
  if (sums.dropped > 0 && config().moe.overflow == Overflow::kReport) {
    say(LogLevel::kWarning, "step {}: {} (token, expert) pairs were dropped", step(), sums.dropped);
  }
}

void Trainer::check_guard(const FinishedStep& done) {
  const optim::StepReport& report = done.report;
  if (!report.skip) return;
  std::string why;
  if (report.bad > 0 && !report.bad_parameter.empty()) {
    why = text("{} non-finite gradient values, first in {} on rank {}", report.bad,
               report.bad_parameter, report.bad_rank);
  } else if (report.bad > 0) {
    why = text("{} non-finite values", report.bad);
  } else if (report.tokens == 0) {
    why = "no valid target";
  } else {
    why = text("loss {:.4f} is a spike", report.losses[0] / double(report.tokens));
  }
  say(LogLevel::kWarning, "step {} was skipped: {}", step(), why);
  event("skip", JsonLine().add("why", why));
  if (!report.halt) return;
  pipeline_.drain();  // the steps behind it have changed nothing
  const std::string verdict = replay(done);
  event("halt", JsonLine().add("why", why).add("verdict", verdict));
  throw NumericalError("step {}: {} step{} in a row {} skipped; the last: {}; replay: {}", step(),
                       report.skips_in_row, report.skips_in_row == 1 ? "" : "s",
                       report.skips_in_row == 1 ? "was" : "were", why, verdict);
}

}  // namespace moiety::train
