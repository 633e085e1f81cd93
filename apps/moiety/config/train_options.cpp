#include "apps/moiety/config/train_options.h"

#include <charconv>
#include <optional>

#include "apps/moiety/config/model_options.h"
#include "apps/moiety/config/names.h"
#include "moiety/base/integer.h"
#include "moiety/data/sha256.h"
#include "moiety/data/tokenizer.h"

namespace moiety::app {
namespace {

using train::DispatchFormat, train::GradReduce, train::Overflow, train::Recipe, train::ResumeFrom;

constexpr Names<Recipe, 6> kRecipes{{{"fp32", Recipe::kFp32},
                                     {"bf16", Recipe::kBf16},
                                     {"fp8_tensor", Recipe::kFp8Tensor},
                                     {"fp8_block", Recipe::kFp8Block},
                                     {"mxfp8", Recipe::kMxfp8},
                                     {"nvfp4", Recipe::kNvfp4}}};
constexpr Names<DispatchFormat, 4> kDispatch{{{"auto", DispatchFormat::kAuto},
                                              {"bf16", DispatchFormat::kBf16},
                                              {"fp8_block", DispatchFormat::kFp8Block},
                                              {"mxfp8", DispatchFormat::kMxfp8}}};
constexpr Names<train::Scaling, 2> kScalings{
    {{"current", train::Scaling::kCurrent}, {"delayed", train::Scaling::kDelayed}}};
constexpr Names<GradReduce, 2> kGradReduce{
    {{"main_grad", GradReduce::kMainGrad}, {"bf16", GradReduce::kBf16}}};
constexpr Names<Overflow, 3> kOverflow{
    {{"error", Overflow::kError}, {"drop", Overflow::kDrop}, {"report", Overflow::kReport}}};
constexpr Names<data::Pack, 2> kPacks{
    {{"stream", data::Pack::kStream}, {"documents", data::Pack::kDocuments}}};
constexpr Names<moe::ZeroCopy, 2> kZeroCopy{
    {{"off", moe::ZeroCopy::kOff}, {"auto", moe::ZeroCopy::kAuto}}};
constexpr Names<ResumeFrom, 3> kResume{
    {{"auto", ResumeFrom::kNewest}, {"never", ResumeFrom::kNever}, {"must", ResumeFrom::kMust}}};
constexpr Names<std::optional<bool>, 3> kChoices{
    {{"auto", std::nullopt}, {"true", true}, {"false", false}}};
constexpr Names<DType, 2> kTypes{{{"fp32", DType::kFloat32}, {"bf16", DType::kBFloat16}}};
constexpr Names<optim::ScheduleKind, 4> kSchedules{{{"constant", optim::ScheduleKind::kConstant},
                                                    {"linear", optim::ScheduleKind::kLinear},
                                                    {"cosine", optim::ScheduleKind::kCosine},
                                                    {"wsd", optim::ScheduleKind::kWsd}}};
constexpr Names<optim::NanGuard, 3> kGuards{{{"off", optim::NanGuard::kOff},
                                             {"step", optim::NanGuard::kStep},
                                             {"tensor", optim::NanGuard::kTensor}}};
constexpr Names<comm::GpuTransport, 3> kTransports{{{"auto", comm::GpuTransport::kAuto},
                                                    {"mapped", comm::GpuTransport::kMapped},
                                                    {"nccl", comm::GpuTransport::kNccl}}};

// A digest of the values that may change at a resume, without the length of the run: going on for
// longer is nothing else.
std::string settings_digest(const Options& o) {
  std::string values;
  for (const Key& key : option_keys()) {
    if (key.resume != Resume::kMay) continue;
    const std::string name = key.full_name();
    if (name == "train.steps" || name == "train.tokens") continue;
    values += text("{} = {}\n", name, value_text(key, o));
  }
  return data::hex(data::sha256(values));
}

train::RunSettings run_settings(const Options& o) {
  train::RunSettings r{.dir = o.run.dir,
                       .seed = uint64_t(o.run.seed),
                       .ranks = o.run.ranks,
                       .threads = o.run.threads,
                       .resume = ResumeFrom::kPath,
                       .checkpoint = o.run.resume,
                       .variant = settings_digest(o),
                       .init_from = o.run.init_from,
                       .max_hours = o.run.max_hours};
  for (const auto& [word, from] : kResume) {
    if (o.run.resume != word) continue;
    r.resume = from;
    r.checkpoint.clear();
  }
  return r;
}

train::OptimizerSettings optimizer_settings(const Options& o) {
  return {.lr = o.optim.lr,
          .min_lr = o.optim.min_lr,
          .warmup_steps = o.optim.warmup_steps,
          .schedule = value_of(kSchedules, o.optim.schedule),
          .decay_steps = o.optim.decay_steps,
          .beta1 = o.optim.beta1,
          .beta2 = o.optim.beta2,
          .eps = o.optim.eps,
          .weight_decay = o.optim.weight_decay,
          .grad_dtype = value_of(kTypes, o.optim.grad_dtype),
          .state_dtype = value_of(kTypes, o.optim.state_dtype)};
}

train::PrecisionSettings precision_settings(const Options& o) {
  const auto& p = o.precision;
  return {.recipe = value_of(kRecipes, p.recipe),
          .keep_first = p.keep_first,
          .keep_last = p.keep_last,
          .attention_linears = p.attention_linears,
          .dispatch = value_of(kDispatch, p.dispatch),
          .rht = p.rht,
          .stochastic = p.stochastic,
          .weight_2d = value_of(kChoices, p.weight_2d),
          .pow2_scales = p.pow2_scales,
          .scaling = value_of(kScalings, p.scaling),
          .amax_history = p.amax_history,
          .switch_step = p.switch_step,
          .switch_recipe = value_of(kRecipes, p.switch_recipe),
          .grad_reduce = value_of(kGradReduce, p.grad_reduce)};
}

}  // namespace

comm::GpuTransport gpu_transport(const Options& o) {
  return value_of(kTransports, o.comm.transport);
}

data::Pack pack_of(const Options& o) { return value_of(kPacks, o.data.pack); }

train::TrainConfig train_config(const Options& o) {
  return train_config(o, data::Tokenizer::load(o.data.tokenizer));
}

train::TrainConfig train_config(const Options& o, const data::Tokenizer& tokenizer) {
  train::TrainConfig c;
  c.run = run_settings(o);
  c.model = model_config(o, tokenizer.vocab());
  c.moe = {o.moe.capacity_factor, value_of(kOverflow, o.moe.overflow), o.router.bias_rate};
  c.ep = {.zero_copy = value_of(kZeroCopy, o.ep.zero_copy),
          .depth = o.ep.depth,
          .comm_sms = o.ep.comm_sms};
  c.data = {.seq_len = o.data.seq_len,
            .shuffle = o.data.shuffle,
            .document_mask = o.data.document_mask,
            .pack = pack_of(o),
            .epochs = o.data.epochs,
            .prefetch = o.data.prefetch};
  c.train = {.steps = o.train.steps,
             .tokens = o.train.tokens,
             .micro_batch = o.train.micro_batch,
             .global_batch = o.train.global_batch,
             .grad_clip = o.train.grad_clip,
             .cuda_graph = value_of(kChoices, o.train.cuda_graph)};
  c.optim = optimizer_settings(o);
  c.parallel = {o.parallel.dp, o.parallel.tp, o.parallel.gtp, o.parallel.ep, o.parallel.egtp};
  c.comm = {gpu_transport(o), static_cast<int>(o.comm.sum_sms)};
  c.precision = precision_settings(o);
  c.checkpoint = {.interval = o.checkpoint.interval,
                  .keep_last = o.checkpoint.keep_last,
                  .keep_every = o.checkpoint.keep_every,
                  .keep_best = o.checkpoint.keep_best,
                  .async = o.checkpoint.async,
                  .verify = o.checkpoint.verify};
  c.eval = {o.eval.every, o.eval.samples};
  c.profile = parse_profile_steps(o.profile.steps);
  c.log = {o.log.flops == "causal", o.log.peak_tflops};
  c.guard = {.nan = value_of(kGuards, o.guard.nan),
             .max_skips = o.guard.max_skips,
             .spike_sigma = o.guard.spike_sigma,
             .comm_timeout_s = o.guard.comm_timeout_s};
  return c;
}

void check_inputs(const Options& o) {
  if (o.run.dir.empty()) throw UsageError("no run directory: --run DIR");
  if (o.checkpoint.keep_best > 0 && o.data.valid.empty()) {
    throw UsageError("checkpoint.keep_best = {} goes by the validation loss: data.valid is missing",
                     o.checkpoint.keep_best);
  }
  const bool files = !o.data.train.empty();
  if (files != (o.data.synthetic != "none")) return;
  throw UsageError(
      files ? "data.train and data.synthetic = \"{}\" exclude each other"
            : "data.train = []: token files to train on are missing (`moiety prepare` makes them)",
      o.data.synthetic);
}

train::ProfileSteps parse_profile_steps(const std::string& s) {
  if (s.empty()) return {};
  train::ProfileSteps steps;
  const char* end = s.data() + s.size();
  const auto a = std::from_chars(s.data(), end, steps.begin);
  const auto b = a.ptr < end ? std::from_chars(a.ptr + 1, end, steps.end) : a;
  const bool parsed =
      a.ec == std::errc() && a.ptr < end && *a.ptr == ':' && b.ec == std::errc() && b.ptr == end;
  if (!parsed || steps.begin < 1 || steps.end <= steps.begin) {
    throw UsageError(
        "profile.steps = \"{}\": expected \"a:b\" with 1 <= a < b, which traces steps a to b - 1",
        s);
  }
  return steps;
}

train::RankShare rank_share(const Launch& launch, const DeviceChoice& choice) {
  return {.of_machine = launch.ranks_on_machine,
          .of_process = launch.processes ? 1 : launch.ranks,
          .of_gpu = choice.of_gpu};
}

}  // namespace moiety::app
