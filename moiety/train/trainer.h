// Training on one rank, from the first step (or a checkpoint's) to the last. The pipeline runs the
// steps (step_pipeline.h); the trainer does everything between them: reports, the guard,
// evaluation, checkpoints, the end.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "moiety/base/deadline.h"
#include "moiety/base/parallel.h"
#include "moiety/data/batch_loader.h"
#include "moiety/train/checkpoint_keeper.h"
#include "moiety/train/journal.h"
#include "moiety/train/plan.h"
#include "moiety/train/step/learner.h"
#include "moiety/train/step/step_pipeline.h"
#include "moiety/train/train.h"
#include "moiety/train/watchdog.h"

namespace moiety::train {

class Trainer {
 public:
  // Allocates everything, and loads or draws the weights. Collective over `world`. The arguments
  // outlive the object. Throws errors of kNumerical where the guard ends the run, and of
  // kCheckpoint, kIo, kComm, kOutOfMemory, kData.
  Trainer(const TrainingPlan& plan, comm::Communicator& world, Heartbeat& heartbeat);

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

  // trainer_start.cpp: the weights' origin, and the first batch.
  void check_directories();
  void say_what_is_frozen();
  void initialize_or_load();
  std::vector<std::string> resume_candidates_of_rank_0();
  bool load(const std::string& path, bool last);
  void adopt_histories(int64_t steps);
  // Makes the directory follow this start (checkpoints.h) and records it.
  void follow(std::string_view event_name, const std::string& loaded);
  void compare(const std::string& path);
  void measure_peaks();

  void after_step(const FinishedStep& step);
  void at_border();
  void evaluate();
  // The reason for which the weights as they are may be worth nothing; empty if there is none.
  std::string doubts() const;
  bool has_finite_weights();
  RunEnd finish(bool stopped);
  // This rank's requests to all: the caller's, and the end of the time.
  uint32_t requests();
  checkpoint::RunState run_state();

  // trainer_report.cpp: the report on a step, and the end of a bad run.
  void report_step(const FinishedStep& step);
  StepRecord record_of(const FinishedStep& step, int64_t dropped) const;
  void check_guard(const FinishedStep& step);

  // trainer_replay.cpp: the step that the guard halted at, made again under a probe. Collective;
  // returns the verdict of all ranks.
  std::string replay(const FinishedStep& step);
  uint32_t checksum(const model::StepStats& stats);

  const TrainingPlan& plan_;
  ThreadBudget threads_;  // run.threads
  comm::Communicator& world_;
  Heartbeat& heartbeat_;
  Journal journal_;
  Learner learner_;
  StepPipeline pipeline_;
  CheckpointKeeper keeper_;
  std::optional<data::ValidationSet> validation_;
  int64_t trained_tokens_ = 0;
  int64_t evaluated_step_ = -1;
  double validation_loss_ = 0;  // after that step
  bool save_due_ = false;       // an interval or a request, until it is saved
  int64_t loaded_step_ = -1;    // step of the checkpoint that the run continues
  double step_seconds_ = 0;     // seconds of the last step
  Deadline time_limit_;
};

}  // namespace moiety::train
