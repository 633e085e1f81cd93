#include "moiety/train/checkpoint_keeper.h"

#include <utility>

#include "moiety/base/error.h"
#include "moiety/base/trace.h"
#include "moiety/train/stopwatch.h"

namespace moiety::train {
namespace {

// Whether an error comes from the disk: data that are read back may be damaged too.
bool is_of_disk(const Error& e) {
  return e.kind() == ErrorKind::kIo || e.kind() == ErrorKind::kCheckpoint;
}

checkpoint::SaveOptions save_options(const TrainingPlan& plan) {
  const TrainConfig& c = plan.config;
  checkpoint::SaveOptions s;
  s.keep = {.last = int(c.checkpoint.keep_last),
            .every = int(c.checkpoint.keep_every),
            .best = int(c.checkpoint.keep_best)};
  s.verify = c.checkpoint.verify;
  s.tokenizer = plan.tokenizer;
  return s;
}

}  // namespace

CheckpointKeeper::CheckpointKeeper(const TrainingPlan& plan, Learner& learner,
                                   comm::Communicator& world, Heartbeat& heartbeat,
                                   const Journal& journal,
                                   std::function<checkpoint::RunState()> run_state)
    : plan_(plan),
      learner_(learner),
      heartbeat_(heartbeat),
      journal_(journal),
      run_state_(std::move(run_state)),
      saver_(plan.config.checkpoints(), world.bootstrap(), save_options(plan)) {}

void CheckpointKeeper::reserve() {
  if (!plan_.config.checkpoint.async) return;
  saver_.reserve(learner_.saved_state());
  learner_.optimizer.end_view();
}

void CheckpointKeeper::write(int64_t step, bool in_background) {
  started_ = step;  // before it can fail: failures are told of this step
  if (in_background) {
    saver_.start(learner_.saved_state(), run_state_(), learner_.stream);
  } else {
    tell(saver_.save(learner_.saved_state(), run_state_(), learner_.stream));
  }
  learner_.optimizer.end_view();
}

void CheckpointKeeper::save(int64_t step) {
  if (started_ == step) return;
  const Heartbeat::Aside aside(heartbeat_, "checkpoint");
  const TraceSpan span(TraceLane::kHost, "checkpoint");
  Stopwatch watch;
  try {
    write(step, plan_.config.checkpoint.async);
  } catch (const Error& e) {
    if (!is_of_disk(e)) throw;
    tell_of_failure(step, e.what());
  }
  if (Observer* observer = journal_.observer()) observer->saved(step, watch.lap());
  hear_of_saves();
}

void CheckpointKeeper::save_for_good(int64_t step) {
  const Heartbeat::Aside aside(heartbeat_, "checkpoint");
  try {
    if (saved_well() && started_ == step) return;
    write(step, false);
  } catch (const Error& e) {
    if (!is_of_disk(e)) throw;
    throw IoError(e.what());
  }
}

bool CheckpointKeeper::saved_well() {
  try {
    if (const auto result = saver_.wait()) tell(*result);
    return true;
  } catch (const Error& e) {
    if (!is_of_disk(e)) throw;
    tell_of_failure(started_, e.what());
    return false;
  }
}

void CheckpointKeeper::hear_of_saves() {
  const std::optional<checkpoint::SaveReport> report = saver_.poll();
  if (!report) return;
  report->error.empty() ? tell(report->result)
                        : tell_of_failure(report->result.step, report->error);
}

void CheckpointKeeper::tell_of_failure(int64_t step, std::string_view error) {
  if (std::exchange(told_, step) == step) return;
  journal_.say(LogLevel::kWarning, "the checkpoint of step {} failed and is tried again {}: {}",
               step, step < plan_.steps ? "later" : "now", error);
}

void CheckpointKeeper::tell(const checkpoint::SaveResult& r) {
  if (std::exchange(told_, r.step) == r.step) return;
  seconds_ = r.seconds;
  journal_.say(LogLevel::kInfo, "step {}: saved {} ({}, {:.1f} s)", r.step, r.path,
               bytes_text(int64_t(r.bytes)), r.seconds);
  journal_.event("checkpoint", r.step,
                 JsonLine()
                     .add("path", r.path)
                     .add("bytes", r.bytes)
                     .add("id", r.id)
                     .add("seconds", r.seconds)
                     .add("blocked_seconds", r.blocked_seconds));
}

}  // namespace moiety::train
