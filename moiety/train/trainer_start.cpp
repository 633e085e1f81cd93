// How training begins on a rank: groups, memory, weights, data.
#include <cmath>
#include <sstream>
#include <tuple>
#include <utility>

#include "apps/moiety/config/checkpoints.h"
#include "apps/moiety/config/model_options.h"
#include "apps/moiety/config/resume.h"
#include "apps/moiety/config/training_state.h"
#include "apps/moiety/exit_code.h"
#include "moiety/base/gpu.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/loader.h"
#include "moiety/checkpoint/shared_directory.h"
#include "moiety/checkpoint/together.h"
#include "moiety/model/step_input.h"
#include "moiety/train/cpu_peak.h"
#include "moiety/train/hardware.h"
#include "moiety/train/trainer.h"

namespace moiety::app {
namespace {

optim::OptimizerConfig optimizer_config(const Options& o, Device device) {
  optim::OptimizerConfig c;
  c.device = device;
  c.adam.beta1 = o.optim.beta1;
  c.adam.beta2 = o.optim.beta2;
  c.adam.eps = o.optim.eps;
  c.weights = storage_dtype(o);
  c.moments = o.optim.state_dtype == "fp32" ? DType::kFloat32 : DType::kBFloat16;
  c.seed = uint64_t(o.run.seed);
  c.guard = o.guard.nan == "off"      ? optim::NanGuard::kOff
            : o.guard.nan == "tensor" ? optim::NanGuard::kTensor
                                      : optim::NanGuard::kStep;
  c.main_grad = o.optim.grad_dtype == "bf16" ? DType::kBFloat16 : DType::kFloat32;
  c.grad_wire = gradient_wire(o);
  c.max_skips = int(o.guard.max_skips);
  c.spike_sigma = o.guard.spike_sigma;
  return c;
}

optim::Schedule schedule(const Options& o, int64_t steps) {
  optim::Schedule s;
  s.kind = o.optim.schedule == "constant" ? optim::ScheduleKind::kConstant
           : o.optim.schedule == "linear" ? optim::ScheduleKind::kLinear
           : o.optim.schedule == "wsd"    ? optim::ScheduleKind::kWsd
                                          : optim::ScheduleKind::kCosine;
  s.lr = o.optim.lr;
  s.min_lr = o.optim.min_lr;
  s.steps = steps;
  s.warmup_steps = o.optim.warmup_steps;
  s.decay_steps = o.optim.decay_steps;
  return s;
}

data::LoaderConfig loader_config(const Options& o, const Grid& grid, int rank) {
  data::LoaderConfig c;
  c.micro_batch = o.train.micro_batch;
  c.global_batch = o.train.global_batch;
  c.data_rank = data_rank(grid, rank);
  c.data_ranks = data_ranks(grid);
  c.document_mask = o.data.document_mask;
  c.prefetch = int(o.data.prefetch);
  c.wait_limit_s = o.guard.comm_timeout_s;
  return c;
}

// Of a GPU, by its name: bf16 and the recipe's. A GPU that nobody knows has none, so MFU is not a
// number.
std::pair<double, double> known_peaks(Device device, std::string_view recipe) {
  const Hardware* h = find_hardware(gpu_properties(device.index).name);
  if (!h) return {std::nan(""), std::nan("")};
  return {h->bf16, h->rate(recipe)};
}

checkpoint::SaveOptions save_options(const Options& o) {
  checkpoint::SaveOptions s;
  s.keep_last = int(o.checkpoint.keep_last);
  s.keep_every = int(o.checkpoint.keep_every);
  s.verify = o.checkpoint.verify;
  return s;
}

}  // namespace

Trainer::Trainer(const TrainingPlan& plan, comm::Communicator& world, Heartbeat& heartbeat)
    : plan_(plan),
      world_(world),
      heartbeat_(heartbeat),
      stream_(Stream::on(plan.device)),
      tokens_(options().train.micro_batch * options().data.seq_len),
      model_(plan.model, storage_dtype(options()), plan.grid, tokens_,
             options().guard.comm_timeout_s, world, plan.device),
      gathering_(options(), model_.groups(), plan.memory_of_rank),
      optimizer_(training_specs(options(), model_.transformer(), plan.grid, world.rank()),
                 optimizer_config(options(), plan.device), model_.groups(), gathering_.peers(false),
                 gathering_.peers(true)),
      capacity_(options(), model_.transformer(), tokens_ / plan.grid.tp),
      arena_("activations", plan.device),
      saver_(options().run.dir + "/checkpoints", world.bootstrap(), save_options(options())),
      schedule_(schedule(options(), plan.steps)),
      sums_(model_.transformer().make_sums()),
      batches_(options().train.micro_batch, options().data.seq_len, options().data.document_mask,
               kStepsAhead * micro_steps(), plan.device),
      update_input_(byte_size(DType::kFloat64, model::kStepInputWords), kStepsAhead, plan.device,
                    "numbers of a step"),
      report_(DType::kUInt8, {byte_size(DType::kFloat64, model::kStepReportWords)}, plan.device,
              "report of a step"),
      reports_(report_.view().bytes(), kStepsAhead, plan.device, "reports"),
      reported_sums_(sums_.memory().bytes(), kStepsAhead, plan.device, "sums of steps"),
      profiler_(parse_profile_steps(options().profile.steps), options().run.dir, world),
      recipe_(options().precision.recipe),
      time_limit_(Seconds(3600 * options().run.max_hours)) {
  model_.transformer().bind(optimizer_.parameters(), gathering_.bind(optimizer_));
  if (plan.valid) {
    validation_.emplace(plan.valid, options().eval.samples,
                        loader_config(options(), plan.grid, world.rank()));
  }
  heartbeat_.phase("loading");
  checkpoint::check_shared_directory(options().run.dir, world.bootstrap());
  initialize_or_load();
  if (leads() && !plan_.dry_run) plan_.files->directory.write_config(plan_.config);
  if (options().checkpoint.async) saver_.reserve(saved_state());
  measure_peaks();
}

// Rank 0's list, which other processes may not even be able to read.
std::vector<std::string> Trainer::resume_candidates_of_rank_0() {
  std::string lines;
  for (const std::string& path : plan_.resume_from) lines += path + "\n";
  std::istringstream stream(checkpoint::gather(world_.bootstrap(), lines)[0]);
  std::vector<std::string> list;
  for (std::string path; std::getline(stream, path);) list.push_back(path);
  return list;
}

void Trainer::initialize_or_load() {
  const std::vector<std::string> candidates = resume_candidates_of_rank_0();
  for (const std::string& path : candidates) {
    if (load(path, path == candidates.back())) return;
  }
  if (!candidates.empty()) {
    throw CheckpointError("{}/checkpoints: no checkpoint could be read", options().run.dir);
  }
  optimizer_.initialize(uint64_t(options().run.seed), stream_);
  if (!plan_.init_from.empty()) {
    load_weights(plan_.init_from, optimizer_.state_view(), model_);
    optimizer_.publish(stream_);
    say(LogLevel::kInfo, "weights from {}", plan_.init_from);
  }
  start_data(nullptr);
  event("start");
}

// False if the checkpoint is damaged and there is another one to try.
bool Trainer::load(const std::string& path, bool last) {
  if (leads()) {
    const CheckpointInfo saved = read_checkpoint_info(path);
    for (const std::string& change : compare_for_resume(saved.options, options(), path)) {
      say(LogLevel::kInfo, "{}", change);
    }
  }
  optim::StateView view = optimizer_.state_view();
  const optim::StateView biases = model_.router_biases();
  view.insert(view.end(), biases.begin(), biases.end());
  checkpoint::RunState run;
  try {
    run = checkpoint::load(path, view, {}, world_.bootstrap());
  } catch (const CheckpointError& e) {
    if (last) throw;
    say(LogLevel::kWarning, "{}; trying an older checkpoint", e.what());
    return false;
  }
  TrainingState state = parse_training_state(run.state);
  state.guard.t = run.adam_t;
  optimizer_.restore(std::move(state.guard));
  optimizer_.publish(stream_);
  start_data(&state.sampler);
  step_ = loaded_step_ = run.step;
  set_recipe(std::max<int64_t>(step_, 1));
  trained_tokens_ = run.tokens;
  say(LogLevel::kInfo, "resumed from {}{}", path,
      run.layout == rank_layout(plan_.grid) ? "" : " (saved under another layout)");
  event("resume");
  return true;
}

void Trainer::set_recipe(int64_t step) {
  const std::string_view wanted = recipe_of_step(options(), step);
  if (wanted == recipe_) return;
  model::Transformer& model = model_.transformer();
  model.set_precision(precision_of_recipe(options(), wanted));
  std::vector<std::optional<QuantSpec>> formats;
  for (const optim::ParamSpec& spec : model.parameter_specs()) formats.push_back(spec.format);
  graph_.reset();
  settled_ = false;
  gathering_.renew();
  optimizer_.set_formats(formats, stream_);
  model.bind(optimizer_.parameters(), gathering_.bind(optimizer_));
  optimizer_.publish(stream_);
  say(LogLevel::kInfo, "from step {} on: {} in place of {}", step, wanted, recipe_);
  recipe_ = wanted;
}

void Trainer::start_data(const data::SamplerState* from) {
  const auto& data = options().data;
  data::Sampler sampler(plan_.train->sources(), uint64_t(options().run.seed), data.shuffle,
                        uint64_t(data.epochs));
  if (from) sampler.restore(*from);
  loader_ = std::make_unique<data::BatchLoader>(
      plan_.train, std::move(sampler), loader_config(options(), plan_.grid, world_.rank()));
  data_ended_ = false;
}

// CPU ranks measure, all at the same time, as they compute at the same time.
void Trainer::measure_peaks() {
  const double given = options().log.peak_tflops;
  world_.barrier();
  double bf16 = given, recipe = given;
  if (given == 0 && plan_.device.type == DeviceType::kCuda) {
    std::tie(bf16, recipe) = known_peaks(plan_.device, options().precision.recipe);
  } else if (given == 0) {
    bf16 = recipe = measured_tflops(DType::kBFloat16);
    if (storage_dtype(options()) == DType::kFloat32) recipe = measured_tflops(DType::kFloat32);
  }
  if (leads()) plan_.files->reporter.set_peaks(bf16, recipe);
}

}  // namespace moiety::app
