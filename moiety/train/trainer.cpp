#include "moiety/train/trainer.h"

#include <cmath>

#include "moiety/base/error.h"
#include "moiety/comm/mpi_group.h"
#include "moiety/train/evaluation.h"
#include "moiety/train/step/tensor_check.h"
#include "moiety/train/stopwatch.h"
#include "moiety/train/training_state.h"

namespace moiety::train {
namespace {

JsonLine fields_of(const EvaluationLoss& loss) {
  return JsonLine()
      .add("loss", loss.loss)
      .add("bits_per_byte", loss.bits_per_byte)
      .add("tokens", loss.tokens);
}

}  // namespace

RunEnd Trainer::run() {
  heartbeat_.step(step());
  if (step() >= plan_.steps) say(LogLevel::kInfo, "all {} steps are done already", plan_.steps);
  const bool begins = loaded_step_ < 0 && !plan_.dry_run;
  if (begins && config().eval.every > 0) evaluate();  // where a curve of the loss begins
  while (step() < plan_.steps && !plan_.dry_run) {
    pipeline_.fill();
    if (pipeline_.empty()) {
      say(LogLevel::kInfo, "the data has ended after step {}", step());
      break;
    }
    const std::optional<FinishedStep> done = pipeline_.complete();
    if (done) after_step(*done);
    if (!pipeline_.empty()) continue;
    pipeline_.settle(done.has_value());  // a step that will be made again has other rows,
    if (done) at_border();               // and is no border
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
  keeper_.hear_of_saves();
}

void Trainer::at_border() {
  if (is_due(learner_.optimizer.compare_interval(), step())) learner_.optimizer.compare_copies();
  const bool interval = is_due(config().checkpoint.interval, step());
  if (is_due(config().eval.every, step()) || (interval && config().checkpoint.keep_best > 0)) {
    evaluate();
  }
  save_due_ |= interval || pipeline_.asked() & kSaveRequest;
  pipeline_.forget(kSaveRequest);
  if (!save_due_) return;
  // Weights that an update has ruined are not saved, and push out no good checkpoint.
  std::string doubt = doubts();
  if (doubt.empty() && !has_finite_weights()) doubt = "the last update made weights infinite";
  if (!doubt.empty()) {
    say(LogLevel::kWarning, "step {}: the checkpoint waits for a good step: {}", step(), doubt);
    return;
  }
  keeper_.save(step());
  save_due_ = false;
}

std::string Trainer::doubts() const {
  const int32_t skips = learner_.optimizer.step_state().skips_in_row;
  if (skips > 0) {
    return text("the last {}step{} skipped", skips > 1 ? text("{} ", skips) : "",
                skips > 1 ? "s were" : " was");
  }
  if (evaluated_step_ == step() && !std::isfinite(validation_loss_)) {
    return text("the validation loss is {}", validation_loss_);
  }
  return {};
}

// Whether all weights of all ranks are finite. Looks at each of them.
bool Trainer::has_finite_weights() {
  learner_.optimizer.complete_weights(learner_.stream);
  FirstNonFinite probe(learner_.stream);
  probe.look_at_weights(learner_.optimizer.parameters());
  int64_t found = probe.finding() ? 1 : 0;
  world_.all_reduce(TensorView(&found, DType::kInt64, {1}), comm::ReduceOp::kMax, Stream()).wait();
  return found == 0;
}

void Trainer::evaluate() {
  if (!validation_ || evaluated_step_ == step()) return;
  const Heartbeat::Aside aside(heartbeat_, "evaluation");
  const TraceSpan span(TraceLane::kHost, "evaluation");
  Stopwatch watch;
  const int64_t rows = learner_.capacity.rows();
  learner_.optimizer.complete_weights(learner_.stream);
  const EvaluationResult result =
      train::evaluate(learner_.model, *validation_, learner_.capacity, learner_.arena,
                      learner_.stream, &learner_.gathering);
  pipeline_.settle(step() > 0 && learner_.capacity.rows() == rows);
  evaluated_step_ = step();
  validation_loss_ = result.loss;
  const double seconds = watch.lap();
  if (Observer* observer = journal_.observer()) observer->evaluated(step(), result, seconds);
  say(LogLevel::kInfo, "step {}: validation loss {:.4f}, {:.4f} bits per byte, {} tokens, {:.1f} s",
      step(), result.loss, result.bits_per_byte, result.tokens, seconds);
  JsonLine fields = fields_of(result);
  fields.add("seconds", seconds);
  if (result.files.size() > 1) {
    JsonLine files;
    for (const EvaluationLoss& file : result.files) {
      say(LogLevel::kInfo, "  {}: {:.4f}, {:.4f} bits per byte, {} tokens", file.name, file.loss,
          file.bits_per_byte, file.tokens);
      files.raw(file.name, fields_of(file).text());
    }
    fields.raw("files", files.text());
  }
  event("eval", fields);
}

RunEnd Trainer::finish(bool stopped) {
  if (plan_.dry_run) {
    say(LogLevel::kInfo, "dry run: everything is set up; stopped before step {}", step() + 1);
  } else {
    if (!stopped) {
      evaluate();
      plan_.train->await_checks();
    }
    std::string doubt = doubts();
    const bool finite = has_finite_weights();
    if (doubt.empty() && !finite) doubt = "the last update made weights infinite";
    keeper_.keep_all(!doubt.empty());
    if (loaded_step_ != step() && finite) keeper_.save_for_good(step());
    event("stop", JsonLine().add("complete", !stopped));
    if (!doubt.empty() && (!stopped || !finite)) {
      throw NumericalError("step {}: the run ends in doubt: {}{}", step(), doubt,
                           finite ? "; it is saved, beside all older checkpoints"
                                  : "; its weights are not finite, and not saved: go back to an "
                                    "older checkpoint with run.resume");
    }
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
  if (evaluated_step_ == step()) run.validation_loss = validation_loss_;
  run.config = plan_.config_text;
  run.state = to_json({pipeline_.data_state(), guard});
  return run;
}

}  // namespace moiety::train
