// A step, from sums of gradients to published weights.
#include <cstddef>
#include <utility>

#include "moiety/base/copy.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/error.h"
#include "moiety/base/trace.h"
#include "moiety/optim/distributed_optimizer.h"
#include "moiety/optim/stand.h"
#include "moiety/optim/step_rule.h"

namespace moiety::optim {
namespace {

TensorView words_view(std::vector<double>& x) {
  return {x.data(), DType::kFloat64, {static_cast<int64_t>(x.size())}};
}

TensorView bytes_view(StepState& x) { return {&x, DType::kUInt8, {sizeof x}}; }

TensorView first(const Tensor& words, int64_t n) { return words.view().slice(0, 0, n); }

}  // namespace

std::vector<double> input_words(const StepInput& x) {
  namespace word = input_word;
  std::vector<double> out(word::kCount);
  out[word::kLr] = x.lr;
  out[word::kWeightDecay] = x.weight_decay;
  out[word::kClip] = x.clip;
  out[word::kTokens] = static_cast<double>(x.tokens);
  out[word::kBad] = static_cast<double>(x.bad);
  out[word::kOverflow] = x.overflow;
  out[word::kRequired] = static_cast<double>(x.required);
  out[word::kFlags] = x.flags;
  out.insert(out.end(), x.losses.begin(), x.losses.end());
  return out;
}

DistributedOptimizer::StepMemory::StepMemory(Device device, int ranks)
    : statistics(DType::kUInt8, {sizeof(GradStatistics)}, device),
      state(DType::kUInt8, {sizeof(StepState)}, device),
      adamw(DType::kUInt8, {sizeof(AdamWStep)}, device),
      words(DType::kFloat64, {rank_word::kCount + kMaxStepLosses}, device),
      all_words(DType::kFloat64, {ranks * (rank_word::kCount + kMaxStepLosses)}, device),
      input(DType::kFloat64, {input_word::kCount + kMaxStepLosses}, device),
      report(DType::kFloat64, {report_word::kCount + kMaxStepLosses}, device) {}

StepReport DistributedOptimizer::step(const StepInput& input, Stream stream) {
  MOIETY_CHECK(input.tokens >= 0, "optimizer: {} tokens", input.tokens);
  check_losses(static_cast<int64_t>(input.losses.size()));
  std::vector<double> in = input_words(input), out(report_word::kCount + input.losses.size());
  const TensorView input_there = first(step_.input, words_view(in).numel()),
                   report_there = first(step_.report, words_view(out).numel());
  copy(input_there, words_view(in), stream);
  enqueue(input_there, report_there, stream);
  copy(words_view(out), report_there, stream);
  stream.synchronize();
  return read_report(words_view(out));
}

void DistributedOptimizer::check_losses(int64_t losses) const {
  MOIETY_CHECK(losses >= 0 && losses <= kMaxStepLosses, "optimizer: {} losses, at most {}", losses,
               kMaxStepLosses);
}

void DistributedOptimizer::enqueue(TensorView input, TensorView report, Stream stream) {
  const TraceSpan span(TraceLane::kHost, "optimizer");
  const int64_t losses = input.numel() - input_word::kCount, ranks = world_.size();
  check_losses(losses);
  MOIETY_CHECK(late_.empty() || std::exchange(begun_, false),
               "optimizer: a step without begin_forward, which its weights wait for");
  stream_ = stream;
  finish_gradients(stream);
  const bool compares = config_.compare_copies > 0 && ranks > 1 && !on_gpu();
  if (compares && step_state().t % config_.compare_copies == 0) {
    compare_copies();
  }
  const int64_t width = rank_word::kCount + losses;
  const TensorView words = first(step_.words, width),
                   all_words = first(step_.all_words, ranks * width);
  take_statistics(stream);
  pack_words(step_.statistics, input, words, stream);
  world_.all_gather(words, all_words, stream).wait();
  step_rule(rule(), input, all_words.reshape({ranks, width}), step_.state, step_.adamw, report,
            stream);
  // A skipped step changes nothing and casts the same bytes again.
  await_drained(stream);
  update(stream);
  gather_weights(false, stream);
  if (lane_) {
    join(stream);
    double* const stood = report.data<double>() + report_word::kStood;
    if constexpr (kCudaBuilt) take_stands_cuda(stands_, stood, stream);
  }
  begin_gradients();
}

// Changes the own segments, group by group; where there is a lane each group that is not late travels
// while the next one changes.
void DistributedOptimizer::update(Stream stream) {
  for (const Update& group : updates_) {
    if constexpr (kCudaBuilt) {
      if (fault_words_.view().defined()) {
        skip_on_fault_cuda(fault_words_, skip().data<int32_t>(), stream);
      }
    }
    adamw(config_.adam, config_.seed, step_.adamw, group.table, stream);
    if (!lane_ || group.late) continue;
    fork(stream);
    for (const size_t i : group.buckets) {
      if (travels_on_lane(buckets_[i])) gather_on(buckets_[i], lane_->stream());
    }
  }
}

StepReport DistributedOptimizer::read_report(TensorView on_host) const {
  namespace word = report_word;
  check_tensor("optimizer", "report", on_host, DType::kFloat64, {-1});
  check_device("optimizer", "report", on_host, Stream());
  check_losses(on_host.numel() - word::kCount);
  const double* x = on_host.data<double>();
  StepReport out{.norm = static_cast<float>(x[word::kNorm]),
                 .coef = x[word::kCoef],
                 .skip = x[word::kSkip] != 0,
                 .halt = x[word::kHalt] != 0,
                 .skips_in_row = static_cast<int>(x[word::kSkipsInRow]),
                 .bad = static_cast<int64_t>(x[word::kBad]),
                 .bad_parameter = {},
                 .bad_rank = static_cast<int>(x[word::kBadRank]),
                 .t = static_cast<int64_t>(x[word::kT]),
                 .lr = x[word::kLr],
                 .tokens = static_cast<int64_t>(x[word::kTokens]),
                 .losses = {x + word::kCount, x + on_host.numel()},
                 .overflow = x[word::kOverflow] != 0,
                 .required = static_cast<int64_t>(x[word::kRequired]),
                 .flags = static_cast<uint32_t>(x[word::kFlags]),
                 .stood_ns = static_cast<int64_t>(x[word::kStood])};
  for (int c = 0; c < kParameterClasses; ++c) {
    out.class_norms[c] = static_cast<float>(x[word::kClassNorm + c]);
  }
  if (const double p = x[word::kBadParameter]; p >= 0) {
    out.bad_parameter = specs_.at(static_cast<size_t>(p)).name;
  }
  return out;
}

TensorView DistributedOptimizer::skip() const {
  auto* step = static_cast<std::byte*>(step_.adamw.view().raw());
  return {step + offsetof(AdamWStep, skip), DType::kInt32, {1}, config_.device};
}

StepRuleConfig DistributedOptimizer::rule() const {
  return {.beta1 = config_.adam.beta1,
          .beta2 = config_.adam.beta2,
          .guard = config_.guard,
          .max_skips = config_.max_skips,
          .spike_sigma = config_.spike_sigma};
}

StepState DistributedOptimizer::step_state() const {
  StepState out;
  copy(bytes_view(out), step_.state, stream_);
  stream_.synchronize();
  return out;
}

void DistributedOptimizer::write_state(StepState state) {
  copy(step_.state, bytes_view(state), stream_);
  stream_.synchronize();
}

void DistributedOptimizer::restore(StepState state) {
  state.set_applied(state.t, rule());
  write_state(state);
}

void DistributedOptimizer::clear_halt() {
  StepState state = step_state();
  state.halt = false;
  write_state(state);
}

}  // namespace moiety::optim
