// The steps under way and their completion; step_work.cpp has the step itself.
#include "moiety/train/step/step_pipeline.h"

#include <cstring>
#include <utility>

#include "moiety/base/error.h"
#include "moiety/model/step_input.h"
#include "moiety/train/precision.h"

namespace moiety::train {
namespace {

optim::Schedule schedule(const TrainConfig& c, int64_t steps) {
  optim::Schedule s;
  s.kind = c.optim.schedule;
  s.lr = c.optim.lr;
  s.min_lr = c.optim.min_lr;
  s.steps = steps;
  s.warmup_steps = c.optim.warmup_steps;
  s.decay_steps = c.optim.decay_steps;
  return s;
}

}  // namespace

data::LoaderConfig loader_config(const TrainConfig& c, const Grid& grid, int rank) {
  data::LoaderConfig l;
  l.micro_batch = c.train.micro_batch;
  l.global_batch = c.train.global_batch;
  l.data_rank = data_rank(grid, rank);
  l.data_ranks = data_ranks(grid);
  l.document_mask = c.data.document_mask;
  l.pack = c.data.pack;
  l.prefetch = int(c.data.prefetch);
  l.wait_limit_s = c.guard.comm_timeout_s;
  return l;
}

StepPipeline::StepPipeline(const TrainingPlan& plan, Learner& learner, comm::Communicator& world,
                           Heartbeat& heartbeat, const Journal& journal,
                           std::function<uint32_t()> requests)
    : plan_(plan),
      config_(plan.config),
      learner_(learner),
      world_(world),
      heartbeat_(heartbeat),
      journal_(journal),
      requests_(std::move(requests)),
      micro_steps_(micro_steps(config_, plan.grid)),
      schedule_(schedule(config_, plan.steps)),
      profiler_(config_.profile, config_.run.dir, world),
      sums_(learner.transformer().make_sums()),
      batches_(config_.train.micro_batch, config_.data.seq_len,
               loader_config(config_, plan.grid, world.rank()).parts(), kStepsAhead * micro_steps_,
               plan.device, learner.transformer().takes_turns() ? 2 : 1),
      update_input_(byte_size(DType::kFloat64, model::kStepInputWords), kStepsAhead, plan.device,
                    "numbers of a step"),
      report_(DType::kUInt8, {byte_size(DType::kFloat64, model::kStepReportWords)}, plan.device,
              "report of a step"),
      reports_(report_.view().bytes(), kStepsAhead, plan.device, "reports"),
      reported_sums_(sums_.memory().bytes(), kStepsAhead, plan.device, "sums of steps") {
  for (const RankModel::GpuWait& word : learner.model.gpu_waits()) {
    auto sums = std::make_unique<OutboundRing>(word.ns.bytes(), kStepsAhead, plan.device, "waits");
    gpu_waits_.push_back({word, std::move(sums)});
  }
  marks_.fill(Event::timed());
  for (size_t i = 0; i < marks_.size(); ++i) mark();
}

Event StepPipeline::mark() {
  Event& next = marks_[marked_++ % marks_.size()];
  next.record(learner_.stream);
  return next;
}

void StepPipeline::start(int64_t completed, const data::SamplerState* from) {
  step_ = completed;
  start_data(from);
}

void StepPipeline::start_data(const data::SamplerState* from) {
  data::Sampler sampler(plan_.train->sources(), config_.run.seed, config_.data.shuffle,
                        uint64_t(config_.data.epochs));
  if (from) sampler.restore(*from);
  loader_ = std::make_unique<data::BatchLoader>(plan_.train, std::move(sampler),
                                                loader_config(config_, plan_.grid, world_.rank()));
  data_ended_ = false;
}

int64_t StepPipeline::steps_ahead() const {
  const bool looks_at_steps = checks_tensors() || !settled_;
  if (plan_.device.type == DeviceType::kCpu || looks_at_steps) return 1;
  return ranks_on_gpus() && config_.train.cuda_graph == false ? 1 : kStepsAhead;
}

bool StepPipeline::is_border(int64_t step) const {
  return is_due(config_.eval.every, step) || is_due(config_.checkpoint.interval, step) ||
         is_due(learner_.optimizer.compare_interval(), step) || profiler_.covers(step) ||
         profiler_.covers(step + 1) || recipe_of_step(config_, step + 1) != learner_.recipe;
}

bool StepPipeline::may_enqueue() const {
  if (data_ended_ || last_step() >= plan_.steps) return false;
  if (under_way_.empty()) return true;
  return asked_ == 0 && static_cast<int64_t>(under_way_.size()) < steps_ahead() &&
         !is_border(last_step());
}

bool StepPipeline::captures_steps() const {
  return steps_ahead() > 1 && config_.train.cuda_graph != false && !profiler_.covers(made_step_);
}

void StepPipeline::fill() {
  // All ranks have left what stood between the steps.
  if (ranks_on_gpus() && under_way_.empty() && may_enqueue()) world_.barrier();
  while (may_enqueue() && enqueue()) {
  }
}

bool StepPipeline::enqueue() {
  const Stream& stream = learner_.stream;
  made_step_ = last_step() + 1;
  set_recipe(made_step_);
  StepUnderWay step;
  step.start = loader_->state();
  if (under_way_.empty()) {
    step.begun = mark();
  } else {
    step.begun = under_way_.back().ended;
  }
  const PeerWaits waits = PeerWaits::now();
  const double waited_ms = loader_->waited_ms();
  feed_batch(0);
  if (data_ended_) return false;
  const Profiler::Step profiled(profiler_, made_step_, stream);
  const gpu::Activity before = gpu::activity();
  world_.run_alone(ranks_on_gpus() && !settled_);
  run_step();
  world_.run_alone(ranks_on_gpus());
  const gpu::Activity after = gpu::activity();
  step.found = found_;
  step.activity = {after.allocations - before.allocations, after.waits - before.waits};
  step.waits = PeerWaits::now() - waits;
  step.data_wait_ms = loader_->waited_ms() - waited_ms;
  step.ended = mark();
  under_way_.push_back(std::move(step));
  ++enqueued_;
  return true;
}

optim::StepReport StepPipeline::read_report(int64_t number) {
  return learner_.optimizer.read_report(
      TensorView(reports_.slot(number), DType::kFloat64, {model::kStepReportWords}));
}

void StepPipeline::take_gpu_waits(int64_t number, PeerWaits& waits) {
  for (GpuWait& wait : gpu_waits_) {
    int64_t now = 0;
    std::memcpy(&now, wait.sums->slot(number), sizeof(now));
    waits.of(wait.word.axis) += now - std::exchange(wait.seen, now);
  }
}

std::optional<FinishedStep> StepPipeline::complete() {
  heartbeat_.phase("step");
  world_.wait(under_way_.front().ended);
  optim::StepReport report = read_report(finished_);
  asked_ |= report.flags;
  if (report.overflow) {
    make_again(report);
    return std::nullopt;
  }
  StepUnderWay done = std::move(under_way_.front());
  take_gpu_waits(finished_, done.waits);
  done.waits.of(TraceLane::kDp) += report.stood_ns;
  FinishedStep out{.report = std::move(report),
                   .stats = sums_.read(TensorView(reported_sums_.slot(finished_), DType::kUInt8,
                                                  {sums_.memory().bytes()})),
                   .start = done.start,
                   .found = std::move(done.found),
                   .seconds = 1e-3 * elapsed_ms(done.begun, done.ended),
                   .data_wait_ms = done.data_wait_ms,
                   .waits = done.waits,
                   .activity = done.activity};
  ++finished_;
  under_way_.pop_front();
  ++step_;
  profiler_.keep(step_);
  heartbeat_.step(step_);
  return out;
}

// Every group of ranks that a step waits for would wait for its whole deadline, one after another.
StepPipeline::~StepPipeline() {
  if (under_way_.empty()) return;
  try {
    world_.wait(under_way_.back().ended);
  } catch (const Error&) {  // has been told
  }
}

void StepPipeline::drain() {
  if (!under_way_.empty()) world_.wait(under_way_.back().ended);
  learner_.stream.synchronize();
  for (; finished_ < enqueued_; ++finished_) {
    asked_ |= read_report(finished_).flags;
    PeerWaits unused;
    take_gpu_waits(finished_, unused);
  }
  under_way_.clear();
}

void StepPipeline::make_again(const optim::StepReport& report) {
  const data::SamplerState start = under_way_.front().start;
  drain();
  profiler_.drop(step_ + 1);
  learner_.optimizer.clear_halt();
  learner_.capacity.grow(report.required);
  learner_.share_rows();
  forget_graph();
  journal_.say(LogLevel::kInfo, "step {} is made again: experts now take {} rows a rank", step_ + 1,
               learner_.capacity.rows());
  start_data(&start);
}

void StepPipeline::forget_graph() {
  graph_.reset();
  settled_ = false;
}

void StepPipeline::settle(bool same_rows) {
  if (learner_.settle() || !same_rows) graph_.reset();
  settled_ = same_rows;
}

void StepPipeline::set_recipe(int64_t step) {
  const Recipe wanted = recipe_of_step(config_, step), before = learner_.recipe;
  if (wanted == before) return;
  forget_graph();
  learner_.set_recipe(wanted);
  journal_.say(LogLevel::kInfo, "from step {} on: {} in place of {}", step, name(wanted),
               name(before));
}

}  // namespace moiety::train
