// One step: what the host gives it, the work on the device, and what comes back.
#include <algorithm>
#include <cstring>

#include "apps/moiety/commands/signals.h"
#include "apps/moiety/config/model_options.h"
#include "apps/moiety/exit_code.h"
#include "moiety/comm/mpi_group.h"
#include "moiety/model/step_input.h"
#include "moiety/train/trainer.h"

namespace moiety::app {

int64_t Trainer::micro_steps() const {
  return options().train.global_batch / (options().train.micro_batch * data_ranks(plan_.grid));
}

int64_t Trainer::steps_ahead() const {
  const bool looks_at_steps = checks_tensors() || !settled_;
  return plan_.device.type == DeviceType::kCuda && !looks_at_steps ? kStepsAhead : 1;
}

bool Trainer::is_border(int64_t step) const {
  return is_due(options().eval.every, step) || is_due(options().checkpoint.interval, step) ||
         profiler_.covers(step) || profiler_.covers(step + 1) ||
         recipe_of_step(options(), step + 1) != recipe_;
}

bool Trainer::may_enqueue() const {
  if (data_ended_ || last_step() >= plan_.steps) return false;
  if (under_way_.empty()) return true;
  return asked_ == 0 && static_cast<int64_t>(under_way_.size()) < steps_ahead() &&
         !is_border(last_step());
}

bool Trainer::captures_steps() const {
  return steps_ahead() > 1 && options().train.cuda_graph != "false" &&
         !profiler_.covers(made_step_);
}

bool Trainer::enqueue_step() {
  made_step_ = last_step() + 1;
  set_recipe(made_step_);
  StepUnderWay step;
  step.start = loader_->state();
  if (under_way_.empty()) {
    step.begun = Event::timed();
    step.begun.record(stream_);
  } else {
    step.begun = under_way_.back().ended;
  }
  const PeerWaits waits = PeerWaits::now();
  const double waited_ms = loader_->waited_ms();
  feed_batch(0);
  if (data_ended_) return false;
  const Profiler::Step profiled(profiler_, made_step_, stream_);
  const gpu::Activity before = gpu::activity();
  run_step();
  const gpu::Activity after = gpu::activity();
  step.activity = {after.allocations - before.allocations, after.waits - before.waits};
  step.waits = PeerWaits::now() - waits;
  step.data_wait_ms = loader_->waited_ms() - waited_ms;
  step.ended = Event::timed();
  step.ended.record(stream_);
  under_way_.push_back(std::move(step));
  ++enqueued_;
  return true;
}

void Trainer::run_step() {
  found_.reset();
  if (captures_steps()) {
    for (int64_t m = 1; m < micro_steps(); ++m) feed_batch(m);
    feed_update();
    launch_graph();
    return;
  }
  FirstNonFinite probe;
  if (checks_tensors()) model_.transformer().set_probe(&probe);
  enqueue_passes(true);
  model_.transformer().set_probe(nullptr);
  found_ = probe.finding();
  heartbeat_.phase("optimizer");
  feed_update();
  enqueue_update();
}

void Trainer::launch_graph() {
  if (!graph_) {
    graph_.emplace(stream_, [&] {
      enqueue_passes(false);
      enqueue_update();
    });
    log(LogLevel::kDebug, "the step is a CUDA graph of {} nodes", graph_->nodes());
  }
  graph_->launch(stream_);
}

// Batch 0 of a step comes before everything else: it tells whether there is a step.
void Trainer::feed_batch(int64_t m) {
  heartbeat_.phase("data");
  const data::Batch* batch = loader_->next();
  data_ended_ = batch == nullptr;
  if (batch) batches_.put(*batch, uint64_t(made_step_ * micro_steps() + m));
}

void Trainer::enqueue_passes(bool feeds) {
  model::Transformer& model = model_.transformer();
  sums_.clear(stream_);
  const auto step = gathering_.begin_step("train", micro_steps());
  for (int64_t m = 0; m < micro_steps(); ++m) {
    if (feeds && m > 0) feed_batch(m);
    const ArenaScope activations(arena_);
    model::Batch tokens = batches_.fetch(stream_);
    tokens.first_token = data_rank(plan_.grid, world_.rank()) * tokens_;
    tokens.all_tokens = data_ranks(plan_.grid) * tokens_;
    heartbeat_.phase("forward");
    model.forward(tokens, capacity_.rows(), sums_, arena_, stream_);
    heartbeat_.phase("backward");
    model.backward(tokens, stream_);
  }
  gathering_.flush();
  model.check_tokens();
}

void Trainer::feed_update() {
  namespace word = optim::input_word;
  auto* words = reinterpret_cast<double*>(update_input_.slot(enqueued_));
  words[word::kLr] = optim::learning_rate(schedule_, made_step_ - 1);
  words[word::kWeightDecay] = options().optim.weight_decay;
  words[word::kClip] = options().train.grad_clip;
  words[word::kBad] = found_ ? double(found_->statistics.nan + found_->statistics.infinite) : 0;
  words[word::kFlags] = requests();
}

void Trainer::enqueue_update() {
  update_input_.fetch(stream_);
  const TensorView input(update_input_.block().raw(), DType::kFloat64, {model::kStepInputWords},
                         plan_.device);
  const TensorView report(report_.view().raw(), DType::kFloat64, {model::kStepReportWords},
                          plan_.device);
  model::set_step_input(sums_, capacity_.refuses_drops(), input, stream_);
  optimizer_.enqueue(input, report, stream_);
  if (plan_.model.moe_layers() > 0) {
    world_.all_reduce(sums_.pairs_LE(), comm::ReduceOp::kSum, stream_).wait();
  }
  if (options().router.bias_rate > 0) {
    model_.transformer().update_router_bias(sums_.pairs_LE(), float(options().router.bias_rate),
                                            stream_, optimizer_.skip());
  }
  reports_.store(report_, stream_);
  reported_sums_.store(sums_.memory(), stream_);
}

optim::StepReport Trainer::read_report(int64_t number) {
  return optimizer_.read_report(
      TensorView(reports_.slot(number), DType::kFloat64, {model::kStepReportWords}));
}

void Trainer::complete_step() {
  const StepUnderWay done = under_way_.front();
  heartbeat_.phase("step");
  done.ended.wait();
  const optim::StepReport report = read_report(completed_);
  asked_ |= report.flags;
  if (report.overflow) return make_again(report);
  stats_ = sums_.read(
      TensorView(reported_sums_.slot(completed_), DType::kUInt8, {sums_.memory().bytes()}));
  ++completed_;
  under_way_.pop_front();
  ++step_;
  step_start_ = done.start;
  step_seconds_ = 1e-3 * elapsed_ms(done.begun, done.ended);
  waits_ = done.waits;
  activity_ = done.activity;
  heartbeat_.step(step_);
  after_step(report, step_seconds_, done.data_wait_ms);
}

void Trainer::wait_for_steps() {
  stream_.synchronize();
  for (; completed_ < enqueued_; ++completed_) asked_ |= read_report(completed_).flags;
  under_way_.clear();
}

void Trainer::make_again(const optim::StepReport& report) {
  const data::SamplerState start = under_way_.front().start;
  wait_for_steps();
  optimizer_.clear_halt();
  capacity_.grow(report.required);
  graph_.reset();
  settled_ = false;
  say(LogLevel::kInfo, "step {} is made again: experts now take {} rows a rank", step_ + 1,
      capacity_.rows());
  start_data(&start);
}

uint32_t Trainer::requests() const {
  uint32_t requests = 0;
  const SignalRequest signal = SignalHandlers::take();
  if (signal == SignalRequest::kSave) requests |= kSave;
  if (signal == SignalRequest::kStop) {
    // A launcher tells the survivors of a dead rank to stop: not to be taken for the user's wish.
    if (const auto dead = comm::mpi::dead_peer()) fail(ErrorKind::kComm, "{}", *dead);
    requests |= kStop;
  }
  const double left = (time_limit_.limit() - time_limit_.elapsed()).count();
  if (options().run.max_hours > 0 && left < 2 * step_seconds_ + save_seconds_) requests |= kStop;
  return requests;
}

}  // namespace moiety::app
