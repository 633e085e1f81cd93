#include "moiety/train/config_check.h"

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "moiety/base/error.h"
#include "moiety/model/transformer.h"
#include "moiety/train/precision.h"

namespace moiety::train {
namespace {

template <class... Args>
void require(bool condition, std::string_view format, const Args&... args) {
  if (!condition) throw UsageError(format, args...);
}

void check_precision(const TrainConfig& c, const Grid& grid) {
  const auto& p = c.precision;
  const bool switches = p.switch_step > 0;
  require(!switches || p.recipe != Recipe::kFp32,
          "precision.switch_step = {}: a run of recipe fp32 cannot switch, its activations are "
          "stored in fp32",
          p.switch_step);
  require(p.dispatch == DispatchFormat::kAuto || p.recipe != Recipe::kFp32,
          "precision.dispatch = \"{}\": recipe fp32 stores activations in fp32, and its rows "
          "travel so",
          name(p.dispatch));
  const auto uses = [&](Recipe recipe) { return uses_recipe(c, recipe); };
  require(!uses(Recipe::kFp8Block) || p.weight_2d != false,
          "precision.weight_2d = \"false\": weights of recipe fp8_block are scaled by 128 x 128");
  require(!uses(Recipe::kFp8Tensor) || p.weight_2d != true,
          "precision.weight_2d = \"true\": weights of recipe fp8_tensor have one scale each");
  require(p.scaling != Scaling::kDelayed || uses(Recipe::kFp8Tensor),
          "precision.scaling = \"delayed\": precision.recipe is \"{}\"; only recipe fp8_tensor (or "
          "switch_recipe, with switch_step) has scales of whole tensors to delay, others take "
          "\"current\"",
          name(p.recipe));
  require(p.amax_history >= 1 && p.amax_history <= kMostAmaxHistory,
          "precision.amax_history = {}: expected 1 to {} steps", p.amax_history, kMostAmaxHistory);
  const int64_t kept = std::max<int64_t>(p.keep_first, 0) + std::max<int64_t>(p.keep_last, 0);
  require(kept <= c.model.layers,
          "precision.keep_first = {} and precision.keep_last = {}: model.layers is {}",
          p.keep_first, p.keep_last, c.model.layers);
  require(
      !uses(Recipe::kNvfp4) || !p.stochastic || data_ranks(grid) == 1 || c.pass_tokens() % 16 == 0,
      "train.micro_batch x data.seq_len = {} x {}: must be a multiple of 16 on several data "
      "ranks, for precision.stochastic of recipe nvfp4",
      c.train.micro_batch, c.data.seq_len);
}

// Numbers that are legal by themselves, and too much together for what counts tokens and rows.
void check_counts(const TrainConfig& c, const Grid& grid) {
  constexpr double kMostRows = INT32_MAX, kMostTokens = 4e18;
  const auto& t = c.train;
  const double pass = double(t.micro_batch) * double(c.data.seq_len);
  const double factor = c.moe.capacity_factor;
  const double pairs = pass * double(c.model.router.top_k);
  const double rows = factor < 0 ? pairs * grid.ep : pairs * std::max(factor, 1.25);
  require(rows <= kMostRows,
          "train.micro_batch x data.seq_len x moe.top_k = {} x {} x {}, with moe.capacity_factor = "
          "{}: a rank's experts would get {:.3g} rows, and can have {}",
          t.micro_batch, c.data.seq_len, c.model.router.top_k, factor, rows, INT32_MAX);
  require(double(total_steps(c)) * double(c.step_tokens()) <= kMostTokens,
          "train.steps x train.global_batch x data.seq_len = {} x {} x {}: more than {:.0e} tokens",
          total_steps(c), t.global_batch, c.data.seq_len, kMostTokens);
}

// Micro-batches take turns where rows travel; elsewhere the setting has no effect.
void check_turns(const TrainConfig& c, const Grid& grid) {
  if (c.model.overlap != moe::Overlap::kMicroBatch) return;
  require(grid.ep == 1 || micro_steps(c, grid) >= 2,
          "ep.overlap = \"micro_batch\": two micro-batches take turns, and a step has one: "
          "train.global_batch = {} is train.micro_batch x data ranks = {} x {}",
          c.train.global_batch, c.train.micro_batch, data_ranks(grid));
  require(grid.ep == 1 || c.ep.depth >= 2,
          "ep.overlap = \"micro_batch\": ep.depth is 1, and the exchanges of two micro-batches are "
          "under way; 2 to 8");
}

void check_schedule(const OptimizerSettings& o) {
  require(o.schedule == optim::ScheduleKind::kConstant || o.min_lr <= o.lr,
          "optim.min_lr = {}: is above optim.lr = {}", o.min_lr, o.lr);
}

}  // namespace

void check_training(const TrainConfig& c, const Grid& grid) {
  check_precision(c, grid);
  check_counts(c, grid);
  check_schedule(c.optim);
  const double factor = c.moe.capacity_factor;
  require(factor >= 0 || factor == -1,
          "moe.capacity_factor = {}: 0 (automatic), -1 (worst case) or a positive number", factor);
  require(!c.run.dir.empty(), "run.dir = \"\": a run needs a directory");
  require(c.train.steps == 0 || c.train.tokens == 0,
          "train.steps = {} and train.tokens = {} exclude each other: one of them is 0",
          c.train.steps, c.train.tokens);
  const int64_t slice = c.train.micro_batch * data_ranks(grid);
  require(c.train.global_batch % slice == 0,
          "train.global_batch = {}: must be a multiple of train.micro_batch x data ranks = {} x {}",
          c.train.global_batch, c.train.micro_batch, data_ranks(grid));
  check_turns(c, grid);
}

void check_cuts(const TrainConfig& c, const Grid& grid) {
  try {
    for (const Recipe recipe : {c.precision.recipe, recipe_of_step(c, c.precision.switch_step)}) {
      model::check_tp(c.model, precision_of_recipe(c, recipe), grid.tp);
    }
  } catch (const Error& e) {
    throw UsageError("{}", e.what());
  }
}

void check_overlap(const TrainConfig& c, Device device) {
  if (device.type == DeviceType::kCpu || c.model.overlap != moe::Overlap::kMicroBatch) return;
  throw UsageError(
      "ep.overlap = \"micro_batch\": micro-batches take turns on CPU ranks alone, and the run is "
      "on "
      "{}; none, wgrad or shared",
      name(device));
}

std::optional<std::string> refusal_of_gpus(const Grid& grid) {
  for (const auto& [key, degree, what] :
       {std::tuple("gtp", grid.gtp, "dense weights"), {"egtp", grid.egtp, "experts' weights"}}) {
    if (degree == 1) continue;
    return text(
        "parallel.{} = {}: this version of Moiety gathers {} on CPU ranks alone; on GPUs "
        "ranks take parallel.dp, parallel.tp and parallel.ep",
        key, degree, what);
  }
  return std::nullopt;
}

void check_gpu_layout(const Grid& grid, Device device) {
  if (device.type == DeviceType::kCpu) return;
  if (const auto refusal = refusal_of_gpus(grid)) throw UsageError("{}", *refusal);
}

void check_graph(const TrainConfig& c, Device device) {
  if (c.train.cuda_graph != true) return;
  const char* what = "train.cuda_graph = \"true\"";
  if (device.type == DeviceType::kCpu) throw UsageError("{}, but the run is on the CPU", what);
  if (c.guard.nan == optim::NanGuard::kTensor) {
    throw UsageError("{}: guard.nan = \"tensor\" looks at single operations", what);
  }
}

void check_path(const TrainConfig& c, Device device) {
  if (!c.model.path || c.model.moe_layers() == 0) return;
  try {
    gemm::choose_grouped_mlp({.dtype = storage_dtype(c),
                              .model = c.model.d_model,
                              .ffn = c.model.d_ffn,
                              .interleave = c.model.glu_interleave},
                             device)
        .require(*c.model.path);
  } catch (const Error& e) {
    throw UsageError("moe.path = \"{}\": {}", name(*c.model.path), e.what());
  }
}

int64_t total_steps(const TrainConfig& c) {
  if (c.train.steps > 0) return c.train.steps;
  if (c.train.tokens > 0) return (c.train.tokens + c.step_tokens() - 1) / c.step_tokens();
  return 1000;
}

}  // namespace moiety::train
