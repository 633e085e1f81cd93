// What a Trainer does. The steps themselves are the pipeline's (step_pipeline.h); here is what lies
// between them: reports, the guard, evaluation, checkpoints, the end.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "moiety/base/deadline.h"
#include "moiety/data/batch_loader.h"
#include "moiety/train/checkpoint_keeper.h"
#include "moiety/train/journal.h"
#include "moiety/train/learner.h"
#include "moiety/train/step_pipeline.h"
#include "moiety/train/trainer.h"

namespace moiety::train {

// Contract: Trainer.
class TrainerRun {
 public:
  TrainerRun(const TrainingPlan& plan, comm::Communicator& world, Heartbeat& heartbeat);

  RunEnd run();

 private:
  const TrainConfig& config() const { return plan_.config; }
  bool leads() const { return world_.rank() == 0; }
  int64_t step() const { return pipeline_.completed(); }
  template <class... Args>
  void say(LogLevel level, std::string_view format, const Args&... args) const {
    journal_.say(level, format, args...);
  }
  void event(std::string_view name, const JsonLine& fields = {}) const {
    journal_.event(name, step(), fields);
  }

  // trainer_start.cpp: where the weights come from, and the first batch.
  void initialize_or_load();
  std::vector<std::string> resume_candidates_of_rank_0();
  bool load(const std::string& path, bool last);
  void compare(const std::string& path);
  void measure_peaks();

  void after_step(const FinishedStep& step);
  void at_border();
  void evaluate();
  RunEnd finish(bool stopped);
  // What this rank asks of all: what the caller does, and the end of the time.
  uint32_t requests();
  checkpoint::RunState run_state();

  // trainer_report.cpp: what is said about a step, and what stops a bad run.
  void report_step(const FinishedStep& step);
  StepRecord record_of(const FinishedStep& step, int64_t dropped) const;
  void check_guard(const FinishedStep& step);

  // trainer_replay.cpp: the step that the guard halted at, made again under a probe. Collective;
  // the verdict of all ranks.
  std::string replay(const FinishedStep& step);
  uint32_t checksum(const model::StepStats& stats);

  const TrainingPlan& plan_;
  comm::Communicator& world_;
  Heartbeat& heartbeat_;
  Journal journal_;
  Learner learner_;
  StepPipeline pipeline_;
  CheckpointKeeper keeper_;
  std::optional<data::ValidationSet> validation_;
  int64_t trained_tokens_ = 0;
  int64_t evaluated_step_ = -1;
  int64_t loaded_step_ = -1;  // of the checkpoint that the run continues
  double step_seconds_ = 0;   // of the last step
  Deadline time_limit_;
};

}  // namespace moiety::train
