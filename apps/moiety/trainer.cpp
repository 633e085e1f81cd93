#include "apps/moiety/trainer.h"

#include "apps/moiety/checkpoints.h"
#include "apps/moiety/errors.h"
#include "apps/moiety/signals.h"
#include "apps/moiety/training_state.h"

namespace moiety::app {

int Trainer::run() {
  if (step_ >= plan_.steps) say(LogLevel::kInfo, "all {} steps are done already", plan_.steps);
  while (step_ < plan_.steps && !plan_.dry_run) {
    Stopwatch watch;
    const double waited_ms = loader_->waited_ms();
    const std::optional<optim::StepReport> report = make_step();
    if (!report) {
      say(LogLevel::kInfo, "the data has ended after step {}", step_);
      break;
    }
    ++step_;
    step_seconds_ = watch.lap();
    after_step(*report, step_seconds_, loader_->waited_ms() - waited_ms);
    if (report->flags & kStop && step_ < plan_.steps) return finish(true);
  }
  return finish(false);
}

std::optional<optim::StepReport> Trainer::make_step() {
  const SamplerState before = loader_->state();
  for (;;) {
    stats_ = {};
    if (!accumulate(stats_)) return std::nullopt;
    const optim::StepReport report = optimizer_.step(step_input(stats_), Stream());
    arena_.settle();
    if (!report.overflow) return report;
    optimizer_.clear_halt();
    capacity_.grow(report.required);
    say(LogLevel::kInfo, "step {} is made again: experts now take {} rows a rank", step_ + 1,
        capacity_.rows());
    start_data(&before);
  }
}

bool Trainer::accumulate(model::StepStats& stats) {
  const int64_t micro_steps =
      options().train.global_batch / (options().train.micro_batch * world_.size());
  model::Transformer& model = model_.transformer();
  for (int64_t m = 0; m < micro_steps; ++m) {
    const Batch* batch = loader_->next();
    if (!batch) return false;
    const ArenaScope activations(arena_);
    const model::Batch tokens = model_batch(*batch);
    model.forward(tokens, capacity_.rows(), stats, arena_, Stream());
    model.backward(tokens, Stream());
  }
  return true;
}

optim::StepInput Trainer::step_input(const model::StepStats& stats) const {
  optim::StepInput input;
  input.lr = optim::learning_rate(schedule_, step_);
  input.weight_decay = options().optim.weight_decay;
  input.clip = options().train.grad_clip;
  input.tokens = stats.targets;
  input.losses = {stats.loss_sum, stats.aux_sum, stats.z_sum};
  input.overflow = capacity_.refuses_drops() && stats.overflow();
  input.required = stats.required();
  input.flags = requests();
  return input;
}

uint32_t Trainer::requests() const {
  uint32_t requests = 0;
  const SignalRequest signal = SignalHandlers::take();
  if (signal == SignalRequest::kSave) requests |= kSave;
  if (signal == SignalRequest::kStop) requests |= kStop;
  const double left = (time_limit_.limit() - time_limit_.elapsed()).count();
  if (options().run.max_hours > 0 && left < 2 * step_seconds_ + save_seconds_) requests |= kStop;
  return requests;
}

void Trainer::after_step(const optim::StepReport& report, double seconds, double data_wait_ms) {
  const auto& o = options();
  trained_tokens_ += o.train.global_batch * o.data.seq_len;
  const Tensor pairs_LE = model_.pairs_of_all_ranks(stats_);
  if (o.router.bias_rate > 0 && !report.skip) {
    model_.transformer().update_router_bias(pairs_LE, float(o.router.bias_rate), Stream());
  }
  report_step(report, pairs_LE, seconds, data_wait_ms);
  check_guard(report);
  if (o.eval.every > 0 && step_ % o.eval.every == 0) evaluate();
  const bool due = o.checkpoint.interval > 0 && step_ % o.checkpoint.interval == 0;
  if (due || report.flags & kSave) save(false);
}

void Trainer::evaluate() {
  if (!validation_ || evaluated_step_ == step_) return;
  Stopwatch watch;
  const EvaluationResult result = app::evaluate(model_, *validation_, capacity_, arena_);
  arena_.settle();
  evaluated_step_ = step_;
  const double seconds = watch.lap();
  if (leads()) plan_.reporter.evaluation(seconds);
  say(LogLevel::kInfo, "step {}: validation loss {:.4f}, {:.4f} bits per byte, {} tokens, {:.1f} s",
      step_, result.loss, result.bits_per_byte, result.tokens, seconds);
  event("eval", JsonLine()
                    .add("loss", result.loss)
                    .add("bits_per_byte", result.bits_per_byte)
                    .add("tokens", result.tokens)
                    .add("seconds", seconds));
}

void Trainer::save(bool final) {
  if (saved_step_ == step_) return;
  Stopwatch watch;
  optim::StateView view = optimizer_.state_view();
  if (leads()) {
    const optim::StateView biases = model_.router_biases();
    view.insert(view.end(), biases.begin(), biases.end());
  }
  checkpoint::RunState run;
  run.step = step_;
  run.tokens = trained_tokens_;
  run.seed = uint64_t(options().run.seed);
  run.adam_t = optimizer_.step_state().t;
  run.layout = rank_layout(plan_.grid);
  run.config = config_to_json(plan_.config);
  run.state = to_json({loader_->state(), optimizer_.step_state()});
  try {
    const checkpoint::SaveResult result = saver_.save(view, run, Stream());
    saved_step_ = step_;
    save_seconds_ = watch.lap();
    if (leads()) plan_.reporter.checkpoint(save_seconds_);
    say(LogLevel::kInfo, "step {}: saved {} ({}, {:.1f} s)", step_, result.path,
        bytes_text(int64_t(result.bytes)), save_seconds_);
    event("checkpoint",
          JsonLine().add("path", result.path).add("bytes", result.bytes).add("id", result.id));
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::kIo) throw;
    if (final) throw DiskError("{}", e.what());
    say(LogLevel::kWarning, "the checkpoint of step {} failed and is tried again later: {}", step_,
        e.what());
  }
}

int Trainer::finish(bool stopped) {
  if (plan_.dry_run) {
    say(LogLevel::kInfo, "dry run: everything is set up; stopped before step {}", step_ + 1);
  } else {
    if (!stopped) evaluate();
    save(true);
    event("stop", JsonLine().add("complete", !stopped));
    if (stopped) say(LogLevel::kInfo, "stopped after step {}; start again to go on", step_);
  }
  model_.close();
  return stopped ? kExitStartAgain : kExitDone;
}

}  // namespace moiety::app
