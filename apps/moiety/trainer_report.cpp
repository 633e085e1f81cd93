// What is said about a step, and what stops a bad run.
#include "apps/moiety/errors.h"
#include "apps/moiety/trainer.h"

namespace moiety::app {

void Trainer::report_step(const optim::StepReport& report, const Tensor& pairs_LE, double seconds,
                          double data_wait_ms) {
  // Every rank of an expert-parallel group counts the group's dropped pairs; its first rank tells.
  int64_t dropped = 0;
  if (world_.rank() % plan_.grid.ep == 0) {
    for (const model::MoeLayerStats& layer : stats_.moe) dropped += layer.dropped;
  }
  world_.all_reduce(TensorView(&dropped, DType::kInt64, {1}), comm::ReduceOp::kSum, Stream())
      .wait();
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
  r.dropped = dropped;
  r.skipped = report.skip;
  const model::Config& c = plan_.model;
  const int64_t experts = c.router.experts, layers = c.moe_layers();
  for (int64_t l = 0; l < layers; ++l) {
    const int64_t* pairs = pairs_LE.data<int64_t>() + l * experts;
    r.balance.push_back(imbalance(pairs, experts, experts));
    r.rank_balance.push_back(imbalance(pairs, experts, plan_.grid.ep));
    r.entropy += balance_entropy(pairs, experts) / double(layers);
  }
  const double tokens = double(options().train.global_batch * options().data.seq_len);
  const double per_token =
      model::flops_per_token(c, options().data.seq_len, options().log.flops == "causal");
  const double per_pair = 6 * double(c.d_model) * double(c.d_ffn);
  const double flops = 3 * (per_token * tokens - per_pair * double(dropped));
  plan_.reporter.step(std::move(r), {.seconds = seconds,
                                     .tokens = tokens,
                                     .flops = flops / world_.size(),
                                     .data_wait_ms = data_wait_ms});
  if (dropped > 0 && options().moe.overflow == "report") {
    say(LogLevel::kWarning, "step {}: {} (token, expert) pairs were dropped", step_, dropped);
  }
}

void Trainer::check_guard(const optim::StepReport& report) const {
  if (!report.skip) return;
  const std::string why =
      report.bad > 0 ? text("{} non-finite gradient values, first in {} on rank {}", report.bad,
                            report.bad_parameter, report.bad_rank)
      : report.tokens == 0 ? std::string("no valid target")
                           : text("loss {:.4f} is a spike", report.losses[0] / report.tokens);
  say(LogLevel::kWarning, "step {} was skipped: {}", step_, why);
  event("skip", JsonLine().add("why", why));
  if (report.halt) {
    throw ExitError(kExitNumerical, text("step {}: {} steps in a row were skipped; the last: {}",
                                         step_, report.skips_in_row, why));
  }
}

}  // namespace moiety::app
