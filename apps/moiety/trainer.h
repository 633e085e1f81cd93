// Training on one rank: from the first step (or a checkpoint's) to the last.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/moiety/batch_loader.h"
#include "apps/moiety/evaluation.h"
#include "apps/moiety/expert_capacity.h"
#include "apps/moiety/rank_model.h"
#include "apps/moiety/reporter.h"
#include "moiety/base/arena.h"
#include "moiety/base/deadline.h"
#include "moiety/checkpoint/saver.h"
#include "moiety/optim/distributed_optimizer.h"
#include "moiety/optim/schedule.h"

namespace moiety::app {

// What the ranks of a run share.
struct TrainingPlan {
  const Config& config;
  Grid grid;
  model::Config model;
  int64_t steps = 0;
  std::shared_ptr<const SampleSource> train;
  std::shared_ptr<const SampleSource> valid;  // null: none
  std::vector<std::string> resume_from;       // best first
  std::string init_from;                      // a checkpoint, or empty
  RunDirectory& directory;
  Reporter& reporter;
  bool dry_run = false;
};

class Trainer {
 public:
  // Collective over `world`: allocates, and loads or draws the weights.
  Trainer(const TrainingPlan& plan, comm::Communicator& world);

  // kExitDone, or kExitStartAgain after a signal or at run.max_hours.
  int run();

 private:
  // Requests to all ranks, which travel with a step's statistics; one rank suffices.
  enum Request : uint32_t { kSave = 1, kStop = 2 };

  // trainer_start.cpp: where the weights come from, and the first batch.
  void initialize_or_load();
  bool load(const std::string& path);
  void start_data(const SamplerState* from);
  void measure_peaks();

  // One step, made again until every expert had room. Empty: the data has ended.
  std::optional<optim::StepReport> make_step();
  // Forward and backward of the step's micro-batches; false: the data has ended.
  bool accumulate(model::StepStats& stats);
  optim::StepInput step_input(const model::StepStats& stats) const;
  uint32_t requests() const;

  // What a step leads to: the router's bias, a line and a record, the guard, evaluation,
  // checkpoint.
  void after_step(const optim::StepReport& report, double seconds, double data_wait_ms);
  void report_step(const optim::StepReport& report, const Tensor& pairs_LE, double seconds,
                   double data_wait_ms);
  void check_guard(const optim::StepReport& report) const;
  void evaluate();
  // `final`: a failure ends the run, else it is tried again at the next interval.
  void save(bool final);
  int finish(bool stopped);

  bool leads() const { return world_.rank() == 0; }
  // A line of the run, once for all ranks.
  template <class... Args>
  void say(LogLevel level, std::string_view format, const Args&... args) const {
    if (leads()) plan_.reporter.say(level, format, args...);
  }
  void event(std::string_view name, const JsonLine& fields = {}) const {
    if (leads()) plan_.reporter.event(name, step_, fields);
  }
  const Options& options() const { return plan_.config.options; }

  const TrainingPlan& plan_;
  comm::Communicator& world_;
  int64_t tokens_;  // of a pass
  RankModel model_;
  optim::DistributedOptimizer optimizer_;
  ExpertCapacity capacity_;
  Arena arena_;
  std::optional<ValidationSet> validation_;
  std::unique_ptr<BatchLoader> loader_;
  checkpoint::Saver saver_;
  optim::Schedule schedule_;
  model::StepStats stats_;  // of the last step, this rank's

  int64_t step_ = 0;  // completed
  int64_t trained_tokens_ = 0;
  int64_t saved_step_ = -1, evaluated_step_ = -1;
  Deadline time_limit_;
  double step_seconds_ = 0, save_seconds_ = 0;  // of the last ones
};

}  // namespace moiety::app
