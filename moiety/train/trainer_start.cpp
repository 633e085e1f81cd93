// The start of training on a rank: groups, memory, weights, data.
#include <cmath>
#include <filesystem>
#include <sstream>
#include <tuple>
#include <utility>

#include "moiety/base/error.h"
#include "moiety/base/gpu.h"
#include "moiety/checkpoint/loader.h"
#include "moiety/checkpoint/shared_directory.h"
#include "moiety/checkpoint/together.h"
#include "moiety/hf/side_tensors.h"
#include "moiety/train/amax_histories.h"
#include "moiety/train/checkpoints.h"
#include "moiety/train/cpu_peak.h"
#include "moiety/train/hardware.h"
#include "moiety/train/precision.h"
#include "moiety/train/trainer.h"
#include "moiety/train/training_state.h"

namespace moiety::train {
namespace {

// The TFLOP/s of a GPU, by its name: for bf16 and for the recipe. An unknown GPU has none, so its
// MFU is not a number.
std::pair<double, double> known_peaks(Device device, Recipe recipe) {
  const Hardware* h = find_hardware(gpu_properties(device.index).name);
  if (!h) return {std::nan(""), std::nan("")};
  return {h->bf16, h->rate(recipe)};
}

}  // namespace

Trainer::Trainer(const TrainingPlan& plan, comm::Communicator& world, Heartbeat& heartbeat)
    : plan_(plan),
      threads_(config().run.threads > 0 ? int(config().run.threads) : thread_budget()),
      world_(world),
      heartbeat_(heartbeat),
      journal_(world.rank() == 0 ? plan.observer : nullptr, !plan.dry_run),
      learner_(plan, world),
      pipeline_(plan, learner_, world, heartbeat, journal_, [this] { return requests(); }),
      keeper_(plan, learner_, world, heartbeat, journal_, [this] { return run_state(); }),
      time_limit_(Seconds(3600 * config().run.max_hours)) {
  if (plan.valid) {
    validation_.emplace(plan.valid, config().eval.samples,
                        loader_config(config(), plan.grid, world.rank()));
  }
  heartbeat_.phase("loading");
  check_directories();
  initialize_or_load();
  const gemm::PathReport* path = learner_.model.transformer().expert_path();
  if (path && !is_quantized(config().precision.recipe)) {
    journal_.say(LogLevel::kInfo, "experts: {}, moe.layout {}", path->describe(),
                 moe::name(learner_.model.transformer().row_layout()));
  }
  say_what_is_frozen();
  keeper_.reserve();
  measure_peaks();
}

void Trainer::say_what_is_frozen() {
  int64_t frozen = 0, all = 0;
  for (const optim::ParamSpec& spec : learner_.transformer().parameter_specs()) {
    for (const optim::LogicalTensor& tensor : spec.tensors) {
      int64_t elements = 1;
      for (const int64_t n : tensor.shape) elements *= n;
      all += elements;
      frozen += spec.frozen ? elements : 0;
    }
  }
  if (frozen == 0) return;
  say(LogLevel::kInfo, "train.freeze: {} of {} parameters stay as they are", frozen, all);
}

// Finds out whether all ranks see one run directory, and can write where checkpoints will be.
void Trainer::check_directories() {
  checkpoint::check_shared_directory(config().run.dir, world_.bootstrap());
  const bool exists = leads() && std::filesystem::is_directory(config().checkpoints());
  if (checkpoint::gather(world_.bootstrap(), exists ? "1" : "")[0].empty()) return;
  checkpoint::check_shared_directory(config().checkpoints(), world_.bootstrap());
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
    throw CheckpointError("{}: no checkpoint could be read", config().checkpoints());
  }
  learner_.optimizer.initialize(config().run.seed, learner_.stream);
  if (!plan_.init_from.empty()) {
    load_weights(plan_.init_from, learner_.optimizer.state_view(), learner_.model);
    checkpoint::together(world_.bootstrap(), [&] {
      if (leads()) learner_.side_files = hf::side_files_at(plan_.init_from);
    });
    learner_.optimizer.publish(learner_.stream);
    say(LogLevel::kInfo, "weights from {}", plan_.init_from);
  }
  pipeline_.start(0, nullptr);
  follow("start", {});
}

void Trainer::follow(std::string_view event_name, const std::string& loaded) {
  Following following;
  checkpoint::together(world_.bootstrap(), [&] {
    if (leads() && !plan_.dry_run) following = follow_start(config(), loaded);
  });
  if (!following.sentence.empty()) say(LogLevel::kInfo, "{}", following.sentence);
  event(event_name,
        JsonLine().add("branch", following.branch.number).add("parent", following.branch.parent));
}

// Compares the checkpoint's configuration with this one by the caller's function.
void Trainer::compare(const std::string& path) {
  if (!leads() || !plan_.compare) return;
  const checkpoint::Manifest manifest = checkpoint::read_manifest(path);
  for (const std::string& change : plan_.compare(manifest.run.config, path)) {
    say(LogLevel::kInfo, "{}", change);
  }
}

// Loads a checkpoint; false if it is damaged and there is another one to try.
bool Trainer::load(const std::string& path, bool last) {
  compare(path);
  model::DelayedScales* const scales = learner_.transformer().delayed_scales();
  int64_t history = 0;  // steps of the checkpoint's histories
  checkpoint::RunState run;
  try {
    checkpoint::together(world_.bootstrap(), [&] {
      if (!leads()) return;
      const checkpoint::Manifest manifest = checkpoint::read_manifest(path);
      learner_.side_files = hf::side_files_of(manifest, path);
      history = history_steps(manifest);
    });
    world_.broadcast(TensorView(&history, DType::kInt64, {1}), 0, Stream()).wait();
    optim::StateView wanted = learner_.loaded_state();
    checkpoint::LoadOptions options;
    if (scales && history > 0) {
      const optim::StateView room = history_room(learner_.transformer(), history);
      wanted.insert(wanted.end(), room.begin(), room.end());
    } else {
      options.may_leave = [](std::string_view slot) { return slot == kHistorySlot; };
    }
    run = checkpoint::load(path, wanted, options, world_.bootstrap());
  } catch (const CheckpointError& e) {
    if (last) throw;
    say(LogLevel::kWarning, "{}; trying an older checkpoint", e.what());
    return false;
  }
  TrainingState state = parse_training_state(run.state);
  state.guard.t = run.adam_t;
  learner_.optimizer.restore(std::move(state.guard));
  learner_.optimizer.publish(learner_.stream);
  adopt_histories(history);
  pipeline_.start(run.step, &state.sampler);
  loaded_step_ = run.step;
  pipeline_.set_recipe(std::max<int64_t>(run.step, 1));
  trained_tokens_ = run.tokens;
  say(LogLevel::kInfo, "resumed from {}{}", path,
      run.layout == rank_layout(plan_.grid) ? "" : " (saved under another layout)");
  follow("resume", path);
  return true;
}

// Takes over the histories of delayed scaling that were loaded, of so many steps.
void Trainer::adopt_histories(int64_t steps) {
  model::DelayedScales* const scales = learner_.transformer().delayed_scales();
  if (!scales) return;
  if (steps > 0) scales->adopt(learner_.stream);
  if (steps == 0) {
    say(LogLevel::kWarning,
        "precision.scaling = \"delayed\": the checkpoint has no histories, so the next step of "
        "recipe fp8_tensor is cast with scale 1");
  } else if (steps != scales->length()) {
    say(LogLevel::kInfo, "precision.amax_history = {}: the newest of the checkpoint's {} steps",
        scales->length(), steps);
  }
}

// Measures the peaks of CPU ranks, all at the same time, as they compute at the same time.
void Trainer::measure_peaks() {
  const double given = config().log.peak_tflops;
  world_.barrier();
  double bf16 = given, recipe = given;
  if (given == 0 && plan_.device.type == DeviceType::kCuda) {
    std::tie(bf16, recipe) = known_peaks(plan_.device, config().precision.recipe);
  } else if (given == 0) {
    bf16 = recipe = measured_tflops(DType::kBFloat16);
    if (storage_dtype(config()) == DType::kFloat32) recipe = measured_tflops(DType::kFloat32);
  }
  if (Observer* observer = journal_.observer()) observer->peaks(bf16, recipe);
}

}  // namespace moiety::train
