// Checkpoints of a training: written beside it, heard of at step borders.
#include <utility>

#include "apps/moiety/config/checkpoints.h"
#include "apps/moiety/config/training_state.h"
#include "apps/moiety/exit_code.h"
#include "moiety/train/trainer.h"

namespace moiety::app {
namespace {

// What is read back may be damaged too.
bool is_of_disk(const Error& e) {
  return e.kind() == ErrorKind::kIo || e.kind() == ErrorKind::kCheckpoint;
}

}  // namespace

optim::StateView Trainer::saved_state() {
  optim::StateView view = optimizer_.state_view();
  if (leads()) {
    const optim::StateView biases = model_.router_biases();
    view.insert(view.end(), biases.begin(), biases.end());
  }
  return view;
}

checkpoint::RunState Trainer::run_state() const {
  checkpoint::RunState run;
  run.step = step_;
  run.tokens = trained_tokens_;
  run.seed = uint64_t(options().run.seed);
  run.adam_t = optimizer_.step_state().t;
  run.layout = rank_layout(plan_.grid);
  run.config = config_to_json(plan_.config);
  run.state = to_json({loader_->state(), optimizer_.step_state()});
  return run;
}

void Trainer::write_checkpoint(bool in_background) {
  if (in_background) {
    saver_.start(saved_state(), run_state(), stream_);
  } else {
    tell(saver_.save(saved_state(), run_state(), stream_));
  }
  save_started_ = step_;
}

void Trainer::save() {
  if (save_started_ == step_) return;
  const Heartbeat::Aside aside(heartbeat_, "checkpoint");
  const TraceSpan span(TraceLane::kHost, "checkpoint");
  Stopwatch watch;
  try {
    write_checkpoint(options().checkpoint.async);
  } catch (const Error& e) {
    if (!is_of_disk(e)) throw;
    tell_of_failure(step_, e.what());
  }
  if (leads()) plan_.files->reporter.checkpoint(watch.lap());
  hear_of_saves();
}

void Trainer::save_for_good() {
  const Heartbeat::Aside aside(heartbeat_, "checkpoint");
  try {
    if (saved_well() && save_started_ == step_) return;
    write_checkpoint(false);
  } catch (const Error& e) {
    if (!is_of_disk(e)) throw;
    throw IoError(e.what());
  }
}

// Of the newest save; the same on all ranks.
bool Trainer::saved_well() {
  try {
    if (const auto result = saver_.wait()) tell(*result);
    return true;
  } catch (const Error& e) {
    if (!is_of_disk(e)) throw;
    tell_of_failure(save_started_, e.what());
    return false;
  }
}

void Trainer::hear_of_saves() {
  const std::optional<checkpoint::SaveReport> report = saver_.poll();
  if (!report) return;
  report->error.empty() ? tell(report->result)
                        : tell_of_failure(report->result.step, report->error);
}

void Trainer::tell_of_failure(int64_t step, std::string_view error) {
  if (std::exchange(told_of_save_, step) == step) return;
  say(LogLevel::kWarning, "the checkpoint of step {} failed and is tried again later: {}", step,
      error);
}

void Trainer::tell(const checkpoint::SaveResult& r) {
  if (std::exchange(told_of_save_, r.step) == r.step) return;
  save_seconds_ = r.seconds;
  say(LogLevel::kInfo, "step {}: saved {} ({}, {:.1f} s)", r.step, r.path,
      bytes_text(int64_t(r.bytes)), r.seconds);
  event("checkpoint", JsonLine()
                          .add("path", r.path)
                          .add("bytes", r.bytes)
                          .add("id", r.id)
                          .add("seconds", r.seconds)
                          .add("blocked_seconds", r.blocked_seconds));
}

}  // namespace moiety::app
