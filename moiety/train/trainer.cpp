#include "moiety/train/trainer.h"

#include "moiety/base/error.h"
#include "moiety/comm/mpi_group.h"
#include "moiety/train/evaluation.h"
#include "moiety/train/stopwatch.h"
#include "moiety/train/training_state.h"

namespace moiety::train {

RunEnd Trainer::run() {
  heartbeat_.step(step());
  if (step() >= plan_.steps) say(LogLevel::kInfo, "all {} steps are done already", plan_.steps);
  while (step() < plan_.steps && !plan_.dry_run) {
    pipeline_.fill();
    if (pipeline_.empty()) {
      say(LogLevel::kInfo, "the data has ended after step {}", step());
      break;
    }
    if (const std::optional<FinishedStep> done = pipeline_.complete()) after_step(*done);
    if (!pipeline_.empty()) continue;
    at_border();
    if (pipeline_.asked() & kStopRequest && step() < plan_.steps) return finish(true);
  }
  return finish(false);
}

void Trainer::after_step(const FinishedStep& done) {
  step_seconds_ = done.seconds;
  heartbeat_.phase("report");
  trace_memory();
  trained_tokens_ += config().step_tokens();
  report_step(done);
  check_guard(done);
  keeper_.hear_of_saves(step());
}

void Trainer::at_border() {
  pipeline_.settle();
  if (is_due(config().eval.every, step())) evaluate();
  const bool asked = pipeline_.asked() & kSaveRequest;
  if (is_due(config().checkpoint.interval, step()) || asked) keeper_.save(step());
  pipeline_.forget(kSaveRequest);
}

void Trainer::evaluate() {
  if (!validation_ || evaluated_step_ == step()) return;
  const Heartbeat::Aside aside(heartbeat_, "evaluation");
  const TraceSpan span(TraceLane::kHost, "evaluation");
  Stopwatch watch;
  const int64_t rows = learner_.capacity.rows();
  const EvaluationResult result =
      train::evaluate(learner_.model, *validation_, learner_.capacity, learner_.arena,
                      learner_.stream, &learner_.gathering);
  pipeline_.settle(learner_.capacity.rows() == rows);
  evaluated_step_ = step();
  const double seconds = watch.lap();
  if (Observer* observer = journal_.observer()) observer->evaluated(step(), result, seconds);
  say(LogLevel::kInfo, "step {}: validation loss {:.4f}, {:.4f} bits per byte, {} tokens, {:.1f} s",
      step(), result.loss, result.bits_per_byte, result.tokens, seconds);
  event("eval", JsonLine()
                    .add("loss", result.loss)
                    .add("bits_per_byte", result.bits_per_byte)
                    .add("tokens", result.tokens)
                    .add("seconds", seconds));
}

RunEnd Trainer::finish(bool stopped) {
  if (plan_.dry_run) {
    say(LogLevel::kInfo, "dry run: everything is set up; stopped before step {}", step() + 1);
  } else {
    if (!stopped) {
      evaluate();
      plan_.train->await_checks();
    }
    if (loaded_step_ != step()) keeper_.save_for_good(step());
    event("stop", JsonLine().add("complete", !stopped));
    if (stopped) say(LogLevel::kInfo, "stopped after step {}; start again to go on", step());
  }
  learner_.model.close();
  return stopped ? RunEnd::kStopped : RunEnd::kDone;
}

uint32_t Trainer::requests() {
  uint32_t bits = 0;
  if (plan_.requests) {
    const bool save = plan_.requests->save.exchange(false);
    if (plan_.requests->stop) {
      // A launcher tells the survivors of a dead rank to stop, which is not to be taken for a
      // request.
      if (const auto dead = comm::mpi::dead_peer()) fail(ErrorKind::kComm, "{}", *dead);
      bits |= kStopRequest;
    } else if (save) {
      bits |= kSaveRequest;
    }
  }
  const double left = (time_limit_.limit() - time_limit_.elapsed()).count();
  const bool late = left < 2 * step_seconds_ + keeper_.seconds();
  if (config().run.max_hours > 0 && late) bits |= kStopRequest;
  return bits;
}

checkpoint::RunState Trainer::run_state() {
  const optim::StepState guard = learner_.optimizer.step_state();
  checkpoint::RunState run;
  run.step = step();
  run.tokens = trained_tokens_;
  run.seed = config().run.seed;
  run.adam_t = guard.t;
  run.layout = rank_layout(plan_.grid);
  run.config = plan_.config_text;
  run.state = to_json({pipeline_.data_state(), guard});
  return run;
}

}  // namespace moiety::train
