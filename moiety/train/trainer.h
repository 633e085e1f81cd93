// Training on one rank: from the first step (or a checkpoint's) to the last.
//
// A step is enqueued as a whole: what the host knows goes to the device through rings
// (step_feed.h), what the device finds out comes back through others, when it is there. On a GPU
// the host is up to kStepsAhead steps ahead of the reports that it has read, and nothing inside a
// step waits for it; where train.cuda_graph allows it the step is captured once and launched again.
// At a border (evaluation, checkpoint, another recipe) every step under way is completed first. On
// a CPU a step is over when it has been enqueued: the same code with one step under way.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/moiety/report/run_files.h"
#include "moiety/base/arena.h"
#include "moiety/base/deadline.h"
#include "moiety/base/gpu_runtime.h"
#include "moiety/base/graph.h"
#include "moiety/base/step_ring.h"
#include "moiety/checkpoint/saver.h"
#include "moiety/data/batch_loader.h"
#include "moiety/optim/distributed_optimizer.h"
#include "moiety/optim/schedule.h"
#include "moiety/train/evaluation.h"
#include "moiety/train/expert_capacity.h"
#include "moiety/train/gathering.h"
#include "moiety/train/profile.h"
#include "moiety/train/rank_model.h"
#include "moiety/train/replay.h"
#include "moiety/train/step_feed.h"
#include "moiety/train/tensor_check.h"
#include "moiety/train/watchdog.h"

namespace moiety::app {

// What the ranks of a process share.
struct TrainingPlan {
  const Config& config;
  Device device;               // of the ranks
  int64_t memory_of_rank = 0;  // bytes that one may take
  Grid grid;
  model::Config model;
  int64_t steps = 0;
  std::shared_ptr<const data::SampleSource> train;
  std::shared_ptr<const data::SampleSource> valid;  // null: none
  std::vector<std::string> resume_from;             // best first; rank 0's counts
  std::string init_from;                            // a checkpoint, or empty
  Watchdog& watchdog;
  RunFiles* files = nullptr;  // of rank 0; null in other processes
  bool dry_run = false;
};

class Trainer {
 public:
  // Collective over `world`: allocates, and loads or draws the weights.
  Trainer(const TrainingPlan& plan, comm::Communicator& world, Heartbeat& heartbeat);

  // kExitDone, or kExitStartAgain after a signal or at run.max_hours.
  int run();

 private:
  // Requests to all ranks, which travel with a step's statistics; one rank suffices.
  enum Request : uint32_t { kSave = 1, kStop = 2 };

  // trainer_start.cpp: where the weights come from, and the first batch.
  void initialize_or_load();
  std::vector<std::string> resume_candidates_of_rank_0();
  bool load(const std::string& path, bool last);
  void start_data(const data::SamplerState* from);
  void measure_peaks();

  // The recipe of step `step`, if another one held before; collective.
  void set_recipe(int64_t step);

  // trainer_step.cpp: a step on its way, and its end.
  struct StepUnderWay {
    data::SamplerState start{};  // of the data before it
    Event begun, ended;
    double data_wait_ms = 0;
    PeerWaits waits{};
    gpu::Activity activity{};  // of the host beside it
  };
  // Up to kStepsAhead; one where the host reads what a step came to before the next one begins.
  int64_t steps_ahead() const;
  int64_t last_step() const { return step_ + static_cast<int64_t>(under_way_.size()); }
  static bool is_due(int64_t every, int64_t step) { return every > 0 && step % every == 0; }
  // What is due behind this step needs it completed, and nothing behind it begun.
  bool is_border(int64_t step) const;
  bool may_enqueue() const;
  // False: the data has ended.
  bool enqueue_step();
  void run_step();
  // Forward and backward of the step's micro-batches; `feeds`: with batches that are fetched from
  // the loader beside it.
  void enqueue_passes(bool feeds);
  void enqueue_update();
  void launch_graph();
  bool captures_steps() const;
  void feed_batch(int64_t micro_step);
  void feed_update();
  // Waits for the first step under way and does what it leads to.
  void complete_step();
  optim::StepReport read_report(int64_t number);
  // The step lost pairs, which nothing behind it changed: it is made again with more room.
  void make_again(const optim::StepReport& report);
  void wait_for_steps();
  uint32_t requests() const;
  bool checks_tensors() const { return options().guard.nan == "tensor"; }
  int64_t micro_steps() const;

  // What a step leads to: a line and a record, the guard; at a border evaluation and checkpoint.
  void after_step(const optim::StepReport& report, double seconds, double data_wait_ms);
  void at_border();
  void report_step(const optim::StepReport& report, double seconds, double data_wait_ms);
  void check_guard(const optim::StepReport& report);
  void evaluate();
  int finish(bool stopped);

  // trainer_replay.cpp: the step that the guard halted at, made again under a probe. Collective;
  // the verdict of all ranks.
  std::string replay(const optim::StepReport& report);
  uint32_t checksum();

  // trainer_save.cpp. An interval's or a signal's checkpoint is written beside the next steps; one
  // that fails is tried again at the next interval.
  void save();
  // The last one of the run: waits for it, and its failure ends the run.
  void save_for_good();
  void write_checkpoint(bool in_background);
  bool saved_well();
  // At every step border: rank 0 says how a save ended.
  void hear_of_saves();
  void tell(const checkpoint::SaveResult& result);
  void tell_of_failure(int64_t step, std::string_view error);
  checkpoint::RunState run_state() const;
  optim::StateView saved_state();

  bool leads() const { return world_.rank() == 0; }
  // A line of the run, once for all ranks.
  template <class... Args>
  void say(LogLevel level, std::string_view format, const Args&... args) const {
    if (leads()) plan_.files->reporter.say(level, format, args...);
  }
  void event(std::string_view name, const JsonLine& fields = {}) const {
    if (leads() && !plan_.dry_run) plan_.files->reporter.event(name, step_, fields);
  }
  const Options& options() const { return plan_.config.options; }

  static constexpr int64_t kStepsAhead = 4;

  const TrainingPlan& plan_;
  comm::Communicator& world_;
  Heartbeat& heartbeat_;
  Stream stream_;
  int64_t tokens_;  // of a data rank's pass
  RankModel model_;
  WeightGathering gathering_;
  optim::DistributedOptimizer optimizer_;
  ExpertCapacity capacity_;
  Arena arena_;
  std::optional<data::ValidationSet> validation_;
  std::unique_ptr<data::BatchLoader> loader_;
  checkpoint::Saver saver_;
  optim::Schedule schedule_;

  // Of the step that is made.
  model::StepSums sums_;
  BatchFeed batches_;
  InboundRing update_input_;  // optim::input_word
  Tensor report_;             // optim::report_word, as bytes on the device
  OutboundRing reports_, reported_sums_;
  int64_t enqueued_ = 0, completed_ = 0;  // steps that this object made, repeated ones too
  std::deque<StepUnderWay> under_way_;
  std::optional<Graph> graph_;  // of a step, with all addresses as they are
  bool settled_ = false;        // they will stay
  bool data_ended_ = false;

  model::StepStats stats_;         // of the last step completed, this rank's; pairs of all ranks
  data::SamplerState step_start_;  // before that step
  std::optional<Finding> found_;   // in it, with guard.nan = tensor
  uint32_t asked_ = 0;             // requests that wait for the end of a step

  Profiler profiler_;
  PeerWaits waits_;         // of the last step
  gpu::Activity activity_;  // beside it

  int64_t step_ = 0;         // completed
  int64_t made_step_ = 0;    // the one that is made, or was made last
  std::string_view recipe_;  // of its weights
  int64_t trained_tokens_ = 0;
  int64_t evaluated_step_ = -1;
  int64_t loaded_step_ = -1;   // of the checkpoint that the run continues
  int64_t save_started_ = -1;  // step of the newest save
  int64_t told_of_save_ = -1;
  Deadline time_limit_;
  double step_seconds_ = 0, save_seconds_ = 0;  // of the last ones
};

}  // namespace moiety::app
