#include "apps/moiety/trainer.h"

#include "apps/moiety/errors.h"
#include "apps/moiety/signals.h"
#include "moiety/comm/mpi/mpi_group.h"

namespace moiety::app {

int Trainer::run() {
  heartbeat_.step(step_);
  if (step_ >= plan_.steps) say(LogLevel::kInfo, "all {} steps are done already", plan_.steps);
  while (step_ < plan_.steps && !plan_.dry_run) {
    const Profiler::Step profiled(profiler_, step_ + 1);
    Stopwatch watch;
    const PeerWaits waits = PeerWaits::now();
    const BatchLoader* const loader = loader_.get();  // a step that is repeated gets a new one
    const double waited_ms = loader->waited_ms();
    const std::optional<optim::StepReport> report = make_step();
    if (!report) {
      say(LogLevel::kInfo, "the data has ended after step {}", step_);
      break;
    }
    ++step_;
    step_seconds_ = watch.lap();
    waits_ = PeerWaits::now() - waits;
    heartbeat_.step(step_);
    after_step(*report, step_seconds_,
               loader_->waited_ms() - (loader_.get() == loader ? waited_ms : 0));
    if (asked_ & kStop && step_ < plan_.steps) return finish(true);
  }
  return finish(false);
}

std::optional<optim::StepReport> Trainer::make_step() {
  made_step_ = step_ + 1;
  set_recipe(made_step_);
  step_start_ = loader_->state();
  for (;;) {
    const std::optional<optim::StepReport> report = attempt();
    if (!report) return std::nullopt;
    asked_ |= report->flags;
    if (!report->overflow) return report;
    optimizer_.clear_halt();
    capacity_.grow(report->required);
    say(LogLevel::kInfo, "step {} is made again: experts now take {} rows a rank", step_ + 1,
        capacity_.rows());
    start_data(&step_start_);
  }
}

std::optional<optim::StepReport> Trainer::attempt() {
  FirstNonFinite probe;
  if (checks_tensors()) model_.transformer().set_probe(&probe);
  const bool has_data = accumulate();
  model_.transformer().set_probe(nullptr);
  if (!has_data) return std::nullopt;
  heartbeat_.phase("optimizer");
  found_ = probe.finding();
  const optim::StepReport report = optimizer_.step(step_input(stats_), Stream());
  arena_.settle();
  return report;
}

bool Trainer::accumulate() {
  const Grid& grid = plan_.grid;
  const int64_t micro_steps =
      options().train.global_batch / (options().train.micro_batch * data_ranks(grid));
  model::Transformer& model = model_.transformer();
  const auto step = gathering_.begin_step("train", micro_steps);
  sums_.clear(Stream());
  for (int64_t m = 0; m < micro_steps; ++m) {
    heartbeat_.phase("data");
    const Batch* batch = loader_->next();
    if (!batch) return false;
    const ArenaScope activations(arena_);
    model::Batch tokens = model_batch(*batch);
    tokens.micro_step = uint64_t(made_step_ * micro_steps + m);
    tokens.first_token = data_rank(grid, world_.rank()) * tokens_;
    tokens.all_tokens = data_ranks(grid) * tokens_;
    heartbeat_.phase("forward");
    model.forward(tokens, capacity_.rows(), sums_, arena_, Stream());
    heartbeat_.phase("backward");
    model.backward(tokens, Stream());
  }
  gathering_.flush();
  model.check_tokens();
  stats_ = sums_.read();
  return true;
}

optim::StepInput Trainer::step_input(const model::StepStats& stats) const {
  optim::StepInput input;
  input.lr = optim::learning_rate(schedule_, step_);
  input.weight_decay = options().optim.weight_decay;
  input.clip = options().train.grad_clip;
  input.tokens = stats.targets;
  input.losses = {stats.loss_sum, stats.aux_sum, stats.z_sum};
  input.bad = found_ ? found_->statistics.nan + found_->statistics.infinite : 0;
  input.overflow = capacity_.refuses_drops() && stats.overflow();
  input.required = stats.required();
  input.flags = requests();
  return input;
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

void Trainer::after_step(const optim::StepReport& report, double seconds, double data_wait_ms) {
  const auto& o = options();
  heartbeat_.phase("report");
  trace_memory();
  trained_tokens_ += o.train.global_batch * o.data.seq_len;
  const Tensor pairs_LE = model_.pairs_of_all_ranks(stats_);
  if (o.router.bias_rate > 0 && !report.skip) {
    model_.transformer().update_router_bias(pairs_LE, float(o.router.bias_rate), Stream());
  }
  report_step(report, pairs_LE, seconds, data_wait_ms);
  check_guard(report);
  if (o.eval.every > 0 && step_ % o.eval.every == 0) evaluate();
  const bool due = o.checkpoint.interval > 0 && step_ % o.checkpoint.interval == 0;
  hear_of_saves();
  if (due || asked_ & kSave) save();
  asked_ &= ~uint32_t{kSave};
}

void Trainer::evaluate() {
  if (!validation_ || evaluated_step_ == step_) return;
  const Heartbeat::Aside aside(heartbeat_, "evaluation");
  const TraceSpan span(TraceLane::kHost, "evaluation");
  Stopwatch watch;
  const EvaluationResult result =
      app::evaluate(model_, *validation_, capacity_, arena_, &gathering_);
  arena_.settle();
  evaluated_step_ = step_;
  const double seconds = watch.lap();
  if (leads()) plan_.files->reporter.evaluation(seconds);
  say(LogLevel::kInfo, "step {}: validation loss {:.4f}, {:.4f} bits per byte, {} tokens, {:.1f} s",
      step_, result.loss, result.bits_per_byte, result.tokens, seconds);
  event("eval", JsonLine()
                    .add("loss", result.loss)
                    .add("bits_per_byte", result.bits_per_byte)
                    .add("tokens", result.tokens)
                    .add("seconds", seconds));
}

int Trainer::finish(bool stopped) {
  if (plan_.dry_run) {
    say(LogLevel::kInfo, "dry run: everything is set up; stopped before step {}", step_ + 1);
  } else {
    if (!stopped) evaluate();
    if (loaded_step_ != step_) save_for_good();
    event("stop", JsonLine().add("complete", !stopped));
    if (stopped) say(LogLevel::kInfo, "stopped after step {}; start again to go on", step_);
  }
  model_.close();
  return stopped ? kExitStartAgain : kExitDone;
}

}  // namespace moiety::app
