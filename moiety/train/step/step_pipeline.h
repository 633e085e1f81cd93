// The steps of a rank, one behind the other: the input from the host, the work on the device, and
// the results.
//
// A step is enqueued as a whole. The host's values go to the device through rings (step_feed.h);
// the device's results come back through others when they are there. On a GPU the host is up to
// kStepsAhead steps ahead of the reports that it has read, and nothing inside a step waits for it;
// where train.cuda_graph allows it, the step is captured once and launched again. Before a border
// (evaluation, checkpoint, another recipe) every step under way is completed. On a CPU a step is
// over when it has been enqueued: the same code with one step under way.
//
// Note [Ranks on one GPU]: a kernel of one rank may wait on the GPU for another rank's host. Calls
// that wait for all kernels of a GPU (freeing, some allocations, loading, making a graph) may
// therefore stand only where no rank waits: between steps, which a host barrier separates from the
// next step, and in steps whose addresses are not settled, where operations run alone
// (Communicator::run_alone). The host waits for a step by Communicator::wait, which sees a peer's
// fault. Steps that are not captured are enqueued one at a time, so that no host fills a GPU's queue
// behind a wait.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "moiety/base/gpu_runtime.h"
#include "moiety/base/graph.h"
#include "moiety/base/step_ring.h"
#include "moiety/data/batch_loader.h"
#include "moiety/optim/schedule.h"
#include "moiety/train/journal.h"
#include "moiety/train/plan.h"
#include "moiety/train/profile.h"
#include "moiety/train/step/learner.h"
#include "moiety/train/step/step_feed.h"
#include "moiety/train/step/tensor_check.h"
#include "moiety/train/watchdog.h"

namespace moiety::train {

// Requests to all ranks, bits that travel with a step's statistics.
enum StepRequest : uint32_t { kSaveRequest = 1, kStopRequest = 2 };

// The result of a completed step.
struct FinishedStep {
  optim::StepReport report;
  model::StepStats stats;        // this rank's; pairs of all ranks
  data::SamplerState start;      // the data's state before the step
  std::optional<Finding> found;  // what was found in the step, with guard.nan = tensor
  double seconds = 0;
  double data_wait_ms = 0;
  PeerWaits waits;         // of this rank's host
  gpu::Activity activity;  // of this rank's host
};

class StepPipeline {
 public:
  // `requests` is called once a step for bits of StepRequest, which reach all ranks.
  StepPipeline(const TrainingPlan& plan, Learner& learner, comm::Communicator& world,
               Heartbeat& heartbeat, const Journal& journal, std::function<uint32_t()> requests);
  // Where an error has ended the run with steps under way: their waits for peers end, too.
  ~StepPipeline();

  // Starts after `completed` steps; the data continues at `from` (null: from the start).
  void start(int64_t completed, const data::SamplerState* from);
  // The data's state behind the last completed step.
  data::SamplerState data_state() const { return loader_->state(); }

  int64_t completed() const { return step_; }
  bool empty() const { return under_way_.empty(); }
  // Enqueues as many steps as may be under way; none if the data or the run has ended.
  void fill();
  // Waits for the first step under way. Empty if it lost pairs: it is then made again with more
  // room.
  std::optional<FinishedStep> complete();
  // Waits for all steps under way, whose reports are read only for requests.
  void drain();
  // The requests of any rank that came with the completed steps, until they are forgotten.
  uint32_t asked() const { return asked_; }
  void forget(uint32_t requests) { asked_ &= ~requests; }

  // Settles the arenas, with no step under way: addresses stay from now on, unless experts were
  // given more rows (`same_rows` is false) since the last step.
  void settle(bool same_rows = true);
  // Sets the recipe of step `step`, if the weights have another one. Collective.
  void set_recipe(int64_t step);

  // Runs the last step's passes once more from its data, under a probe, after drain(); and then its
  // update, which changes nothing while the optimizer is halted.
  model::StepStats repeat_passes(const data::SamplerState& from, TensorProbe& probe);
  optim::StepReport repeat_update();

 private:
  struct StepUnderWay {
    data::SamplerState start{};
    Event begun, ended;
    std::optional<Finding> found{};
    double data_wait_ms = 0;
    PeerWaits waits{};
    gpu::Activity activity{};
  };
  // Up to kStepsAhead; one if the host reads the result of a step before the next one begins.
  int64_t steps_ahead() const;
  int64_t last_step() const { return step_ + static_cast<int64_t>(under_way_.size()); }
  // Whether an action that is due behind this step needs it completed and nothing behind it begun.
  bool is_border(int64_t step) const;
  bool may_enqueue() const;
  bool checks_tensors() const { return config_.guard.nan == optim::NanGuard::kTensor; }
  bool captures_steps() const;
  // Enqueues a step; false if the data has ended.
  bool enqueue();
  void run_step();
  // Enqueues forward and backward of the step's micro-batches; with `feeds`, batches are fetched
  // from the loader beside it.
  void enqueue_passes(bool feeds);
  // The same for micro-batches that take turns (model/transformer.h), on two arenas.
  void enqueue_turns(bool feeds);
  model::Transformer::AwaitWeights await_weights();
  model::Transformer::GradientsReady gradients_ready();
  model::Batch fetch_batch();
  void enqueue_update();
  void launch_graph();
  void feed_batch(int64_t micro_step);
  void feed_update();
  void start_data(const data::SamplerState* from);
  optim::StepReport read_report(int64_t number);
  // Adds what the GPU waited for peers in step `number`; called for each step in turn.
  void take_gpu_waits(int64_t number, PeerWaits& waits);
  // Makes the first step again, which lost pairs; nothing behind it has changed that.
  void make_again(const optim::StepReport& report);
  void forget_graph();
  // A point of the stream, whose time is taken.
  Event mark();

  // Whether ranks wait for each other on GPUs.
  bool ranks_on_gpus() const { return plan_.device.type == DeviceType::kCuda && world_.size() > 1; }

  static constexpr int64_t kStepsAhead = 4;

  const TrainingPlan& plan_;
  const TrainConfig& config_;
  Learner& learner_;
  comm::Communicator& world_;
  Heartbeat& heartbeat_;
  const Journal& journal_;
  std::function<uint32_t()> requests_;
  const int64_t micro_steps_;
  optim::Schedule schedule_;
  Profiler profiler_;
  std::unique_ptr<data::BatchLoader> loader_;

  // The step that is being made.
  model::StepSums sums_;
  BatchFeed batches_;
  InboundRing update_input_;  // words of optim::input_word
  Tensor report_;             // words of optim::report_word, as bytes on the device
  OutboundRing reports_, reported_sums_;
  struct GpuWait {
    RankModel::GpuWait word;
    std::unique_ptr<OutboundRing> sums;  // of all steps so far
    int64_t seen = 0;
  };
  std::vector<GpuWait> gpu_waits_;
  std::optional<Finding> found_;
  int64_t made_step_ = 0;  // its number, or that of the step made last

  int64_t step_ = 0;                     // completed steps
  int64_t enqueued_ = 0, finished_ = 0;  // steps that this object made, with repeated ones
  std::deque<StepUnderWay> under_way_;
  // Where steps begin and end, in turns: steps have all but one of them. They are made before there
  // are steps, since a rank that makes an event may wait for other ranks' kernels.
  std::array<Event, kStepsAhead + 2> marks_;
  size_t marked_ = 0;
  std::optional<Graph> graph_;  // a step, with all addresses as they are
  bool settled_ = false;        // whether the addresses will stay
  bool data_ended_ = false;
  uint32_t asked_ = 0;
};

// Whether something that comes every so many steps (0: never) comes behind step `step`.
inline bool is_due(int64_t every, int64_t step) { return every > 0 && step % every == 0; }

// The configuration with which a rank's loader reads its share of the samples.
data::LoaderConfig loader_config(const TrainConfig& config, const Grid& grid, int rank);

}  // namespace moiety::train
