#include "moiety/train/trainer.h"

#include "apps/moiety/exit_code.h"

namespace moiety::app {

int Trainer::run() {
  heartbeat_.step(step_);
  if (step_ >= plan_.steps) say(LogLevel::kInfo, "all {} steps are done already", plan_.steps);
  while (step_ < plan_.steps && !plan_.dry_run) {
    while (may_enqueue() && enqueue_step()) {
    }
    if (under_way_.empty()) {
      say(LogLevel::kInfo, "the data has ended after step {}", step_);
      break;
    }
    complete_step();
    if (!under_way_.empty()) continue;
    at_border();
    if (asked_ & kStop && step_ < plan_.steps) return finish(true);
  }
  return finish(false);
}

void Trainer::after_step(const optim::StepReport& report, double seconds, double data_wait_ms) {
  heartbeat_.phase("report");
  trace_memory();
  trained_tokens_ += options().train.global_batch * options().data.seq_len;
  report_step(report, seconds, data_wait_ms);
  check_guard(report);
  hear_of_saves();
}

void Trainer::at_border() {
  // Addresses stay from now on, unless an evaluation needs more.
  if (arena_.settle()) graph_.reset();
  settled_ = true;
  if (is_due(options().eval.every, step_)) evaluate();
  if (is_due(options().checkpoint.interval, step_) || asked_ & kSave) save();
  asked_ &= ~uint32_t{kSave};
}

void Trainer::evaluate() {
  if (!validation_ || evaluated_step_ == step_) return;
  const Heartbeat::Aside aside(heartbeat_, "evaluation");
  const TraceSpan span(TraceLane::kHost, "evaluation");
  Stopwatch watch;
  const int64_t rows = capacity_.rows();
  const EvaluationResult result =
      app::evaluate(model_, *validation_, capacity_, arena_, stream_, &gathering_);
  const bool moved = arena_.settle();
  if (moved || capacity_.rows() != rows) graph_.reset();
  settled_ = capacity_.rows() == rows;
  evaluated_step_ = step_;
  const double seconds = watch.lap();
  if (leads()) plan_.files->reporter.evaluation(seconds);
  say(LogLevel::kInfo, "step {}: validation loss {:.4f}, {:.4f} bits per byte, {} tokens, {:.1f} s",
      step_, result.loss, result.bits_per_byte, result.tokens, seconds);
  event("eval", JsonLine()
                    .add("loss", result.loss)
                    .add("bits_per_byte", result.bits_per_byte)
                    .add("tokens", result.tokens)
                    .add("seconds", seconds));
}

int Trainer::finish(bool stopped) {
  if (plan_.dry_run) {
    say(LogLevel::kInfo, "dry run: everything is set up; stopped before step {}", step_ + 1);
  } else {
    if (!stopped) evaluate();
    if (loaded_step_ != step_) save_for_good();
    event("stop", JsonLine().add("complete", !stopped));
    if (stopped) say(LogLevel::kInfo, "stopped after step {}; start again to go on", step_);
  }
  model_.close();
  return stopped ? kExitStartAgain : kExitDone;
}

}  // namespace moiety::app
