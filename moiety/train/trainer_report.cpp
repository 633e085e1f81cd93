// What is said about a step, and what stops a bad run.
#include <algorithm>
#include <cmath>

#include "apps/moiety/exit_code.h"
#include "moiety/train/trainer.h"

namespace moiety::app {

void Trainer::report_step(const optim::StepReport& report, double seconds, double data_wait_ms) {
  // Every rank of an expert-parallel group counts the group's dropped pairs; its first rank tells.
  int64_t dropped = 0;
  if (world_.rank() % plan_.grid.ep == 0) {
    for (const model::MoeLayerStats& layer : stats_.moe) dropped += layer.dropped;
  }
  struct Sums {
    int64_t dropped, ns;
    PeerWaits waits;
  } sums{dropped, std::llround(1e9 * seconds), waits_};
  constexpr int64_t kSums = sizeof(Sums) / sizeof(int64_t);
  world_.all_reduce(TensorView(&sums, DType::kInt64, {kSums}), comm::ReduceOp::kSum, Stream())
      .wait();
  dropped = sums.dropped;
  if (!leads()) return;
  StepRecord r;
  r.step = step_;
  r.tokens = trained_tokens_;
  const double targets = double(report.tokens);
  r.loss = report.losses[0] / targets;
  r.aux = report.losses[1] / targets;
  r.z = report.losses[2] / targets;
  r.grad_norm = report.norm;
  r.lr = report.lr;
  r.recipe = recipe_;
  r.dropped = dropped;
  r.skipped = report.skip;
  if (plan_.device.type == DeviceType::kCuda) r.activity = activity_;
  const model::Config& c = plan_.model;
  const int64_t experts = c.router.experts, layers = c.moe_layers();
  for (int64_t l = 0; l < layers; ++l) {
    const int64_t* pairs = stats_.moe[l].expert_pairs.data();
    r.balance.push_back(imbalance(pairs, experts, experts));
    r.rank_balance.push_back(imbalance(pairs, experts, plan_.grid.ep));
    r.entropy += balance_entropy(pairs, experts) / double(layers);
  }
  const double tokens = double(options().train.global_batch * options().data.seq_len);
  const double per_token =
      model::flops_per_token(c, options().data.seq_len, options().log.flops == "causal");
  const double flops = per_token * tokens - model::flops_per_pair(c) * double(dropped);
  // The share of all ranks' time, of a step: ranks begin and end it at slightly different times.
  WaitTimes waits;
  for (size_t a = 0; a < kWaitAxes.size(); ++a) {
    waits.ms[a] = 1e3 * seconds * double(sums.waits.ns[a]) / double(std::max<int64_t>(sums.ns, 1));
  }
  plan_.files->reporter.step(std::move(r), {.seconds = seconds,
                                            .tokens = tokens,
                                            .flops = flops / world_.size(),
                                            .data_wait_ms = data_wait_ms,
                                            .waits = waits});
  if (dropped > 0 && options().moe.overflow == "report") {
    say(LogLevel::kWarning, "step {}: {} (token, expert) pairs were dropped", step_, dropped);
  }
}

void Trainer::check_guard(const optim::StepReport& report) {
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
  say(LogLevel::kWarning, "step {} was skipped: {}", step_, why);
  event("skip", JsonLine().add("why", why));
  if (!report.halt) return;
  wait_for_steps();  // which have changed nothing
  const std::string verdict = replay(report);
  event("halt", JsonLine().add("why", why).add("verdict", verdict));
  throw NumericalError("step {}: {} step{} in a row {} skipped; the last: {}; replay: {}", step_,
                       report.skips_in_row, report.skips_in_row == 1 ? "" : "s",
                       report.skips_in_row == 1 ? "was" : "were", why, verdict);
}

}  // namespace moiety::app
