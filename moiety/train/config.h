// The configuration of a training, as values. Sections and names are those of the program's keys,
// which error texts name and docs/config.md describes; the library reads no text. The samples
// themselves come from the caller (plan.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "moiety/base/dtype.h"
#include "moiety/comm/gpu_transport.h"
#include "moiety/data/sample_source.h"
#include "moiety/model/config.h"
#include "moiety/moe/ep_group.h"
#include "moiety/optim/schedule.h"
#include "moiety/optim/step_decision.h"

namespace moiety::train {

// The place where a run begins that finds checkpoints in its directory.
enum class ResumeFrom {
  kNewest,  // the newest complete one, or anew if there is none
  kNever,   // anew; a directory with checkpoints is refused
  kMust,    // the newest complete one, which must be there
  kPath,    // RunSettings::checkpoint
};

// The storage of weights and activations; those from kFp8Tensor on quantize the linears of bf16.
enum class Recipe { kFp32, kBf16, kFp8Tensor, kFp8Block, kMxfp8, kNvfp4 };
// The recipe's name: "fp32", "bf16", "fp8_tensor", "fp8_block", "mxfp8" or "nvfp4".
std::string_view name(Recipe recipe);

// The format of tokens' rows on the way to their experts.
// The scale of a tensor: of its own largest element, or of those of the steps before.
enum class Scaling { kCurrent, kDelayed };
enum class DispatchFormat { kAuto, kBf16, kFp8Block, kMxfp8 };  // kAuto: the storage type
std::string_view name(DispatchFormat format);

// The format of gradients as they travel over gtp, egtp and dp.
enum class GradReduce { kMainGrad, kBf16 };  // kMainGrad: as they are kept

// The consequence of needing more rows than the given capacity factor allows.
enum class Overflow { kError, kDrop, kReport };

struct RunSettings {
  std::string dir;  // profile/, failures/ and checkpoints/ lie there
  uint64_t seed = 1234;
  int64_t ranks = 1;
  int64_t threads = 0;  // of a rank's loops; 0: its thread's budget (moiety/base/parallel.h)
  ResumeFrom resume = ResumeFrom::kNewest;
  std::string checkpoint;  // for kPath: a checkpoint, or a run directory
  std::string variant;     // any text: runs from one checkpoint that differ in it are two branches
  std::string init_from;   // checkpoint or Hugging Face folder: its weights alone; empty: none
  double max_hours = 0;    // save and stop before this time; 0: no limit
};

struct ExpertSettings {
  double capacity_factor = 0;  // rows a rank / balanced; 0: automatic, never drops; -1: worst case
  Overflow overflow = Overflow::kError;
  double bias_rate = 0;  // router.bias_rate: > 0 balances by a bias of the scores
};

struct ExpertParallelSettings {
  // Rows of forward that peers reach where they lie, with the same bits (moe/ep_group.h).
  moe::ZeroCopy zero_copy = moe::ZeroCopy::kOff;
  int64_t depth = 2;     // parts of the group's memory (moe/ep_group.h)
  int64_t comm_sms = 0;  // multiprocessors that push rows (moe/ep_group.h); 0: the default
};

struct DataSettings {
  int64_t seq_len = 1024;  // S, tokens of a sample
  bool shuffle = true;
  bool document_mask = false;  // attention stays inside a document; packed documents imply it
  data::Pack pack = data::Pack::kStream;
  int64_t epochs = 0;    // passes over the data; 0: endless
  int64_t prefetch = 4;  // batches made ahead
};

struct BatchSettings {
  int64_t steps = 0;               // steps of the run; 0: from `tokens`, or 1000 without those
  int64_t tokens = 0;              // tokens of the run, instead of steps
  int64_t micro_batch = 1;         // sequences of a pass on one rank
  int64_t global_batch = 8;        // sequences of a step; a multiple of micro_batch x data ranks
  double grad_clip = 1;            // largest norm of the mean gradient; 0: any
  std::optional<bool> cuda_graph;  // capture steps on a GPU; absent: where nothing forbids it
};

struct OptimizerSettings {
  double lr = 3e-4;
  double min_lr = 3e-5;
  int64_t warmup_steps = 100;
  optim::ScheduleKind schedule = optim::ScheduleKind::kCosine;
  int64_t decay_steps = 0;  // 0: all steps after the warm-up, for kWsd a tenth of the run
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  DType grad_dtype = DType::kFloat32;   // main_grad: float32 or bfloat16
  DType state_dtype = DType::kFloat32;  // moments: float32 or bfloat16
};

struct ParallelSettings {
  int64_t dp = 0;  // 0: the ranks that remain
  int64_t tp = 1;
  int64_t gtp = 1;
  int64_t ep = 1;
  int64_t egtp = 1;
};

struct CommSettings {
  comm::GpuTransport transport = comm::GpuTransport::kAuto;  // of ranks on GPUs
  int sum_sms = 12;                                          // comm::GpuLinkOptions::sum_blocks
};

inline constexpr int64_t kMostAmaxHistory = 1024;

struct PrecisionSettings {
  Recipe recipe = Recipe::kBf16;
  int64_t keep_first = -1;  // first and last layers that stay bf16; -1: the recipe's rule
  int64_t keep_last = -1;
  bool attention_linears = true;
  DispatchFormat dispatch = DispatchFormat::kAuto;
  bool rht = true;
  bool stochastic = true;
  std::optional<bool> weight_2d;  // absent: the recipe's rule
  bool pow2_scales = true;
  Scaling scaling = Scaling::kCurrent;  // of x and dy of kFp8Tensor
  int64_t amax_history = 16;            // steps that delayed scales look back on
  int64_t switch_step = 0;              // first step of switch_recipe; 0: none
  Recipe switch_recipe = Recipe::kBf16;
  GradReduce grad_reduce = GradReduce::kMainGrad;
};

struct CheckpointSettings {
  int64_t interval = 1000;  // steps; 0: one at the end
  int64_t keep_last = 3;
  int64_t keep_every = 0;  // steps whose checkpoints are kept for good; 0: none
  int64_t keep_best = 0;   // with the lowest validation losses; > 0 evaluates at every checkpoint
  bool async = true;       // written beside training, from a copy of the state
  bool verify = true;
};

struct EvaluationSettings {
  int64_t every = 0;     // steps; 0: one at the end
  int64_t samples = 64;  // samples of each source
};

// The steps to trace, begin ... end - 1; the first step of a run is 1. 0, 0: none.
struct ProfileSteps {
  int64_t begin = 0, end = 0;
};

struct MeasureSettings {
  bool causal_flops = true;  // count the half of the scores that the mask leaves
  double peak_tflops = 0;    // peak of a rank, for MFU; 0: measured
};

struct GuardSettings {
  optim::NanGuard nan = optim::NanGuard::kStep;
  int64_t max_skips = 3;        // skipped steps in a row that end the run
  double spike_sigma = 0;       // > 0: skips a step whose loss is that far above the last 128
  double comm_timeout_s = 100;  // limit of every wait for another rank
};

struct TrainConfig {
  RunSettings run;
  model::Config model;  // `overflow` must be kDrop: expert_capacity.h decides the consequence
  ExpertSettings moe;
  ExpertParallelSettings ep;
  DataSettings data;
  BatchSettings train;
  OptimizerSettings optim;
  ParallelSettings parallel;
  CommSettings comm;
  PrecisionSettings precision;
  CheckpointSettings checkpoint;
  EvaluationSettings eval;
  ProfileSteps profile;
  MeasureSettings log;
  GuardSettings guard;

  TrainConfig() { model.overflow = moe::OverflowPolicy::kDrop; }

  // Tokens of a data rank's pass, and of a step.
  int64_t pass_tokens() const { return train.micro_batch * data.seq_len; }
  int64_t step_tokens() const { return train.global_batch * data.seq_len; }
  std::string checkpoints() const {
    return (std::filesystem::path(run.dir) / "checkpoints").string();
  }
};

}  // namespace moiety::train
