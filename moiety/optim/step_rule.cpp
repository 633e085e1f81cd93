#include "moiety/optim/step_rule.h"

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/optim/step_combine.h"

namespace moiety::optim {
namespace {

// The number of words that follow the `named` ones.
int64_t count_losses(const char* operation, const char* argument, const TensorView& words,
                     int64_t named) {
  MOIETY_CHECK(words.numel() >= named, "{}: {} is {}, expected at least {} words", operation,
               argument, words.describe(), named);
  return words.numel() - named;
}

template <class T>
T* check_bytes(const char* operation, const char* argument, const TensorView& x) {
  check_tensor(operation, argument, x, DType::kUInt8, {sizeof(T)});
  return static_cast<T*>(x.raw());
}

}  // namespace

void StepState::set_applied(int64_t applied, const StepRuleConfig& config) {
  t = applied;
  b1pow = b2pow = 1;
  for (int64_t i = 0; i < applied; ++i) {
    const double before1 = b1pow, before2 = b2pow;
    b1pow *= config.beta1;
    b2pow *= config.beta2;
    if (b1pow == before1 && b2pow == before2) break;  // they are 0, or as small as can be
  }
}

std::vector<double> StepState::last_losses() const {
  std::vector<double> out;
  for (int64_t i = std::max<int64_t>(0, loss_count - kSpikeWindow); i < loss_count; ++i) {
    out.push_back(losses[i % kSpikeWindow]);
  }
  return out;
}

void StepState::set_losses(std::span<const double> oldest_first) {
  loss_count = 0;
  losses = {};
  for (const double loss : oldest_first) enter_loss(loss);
}

void pack_words(TensorView statistics, TensorView input, TensorView words, Stream stream) {
  const char* operation = "pack_words";
  const auto* sums = check_bytes<GradStatistics>(operation, "statistics", statistics);
  const int64_t losses = count_losses(operation, "input", input, input_word::kCount);
  check_tensor(operation, "input", input, DType::kFloat64, {-1});
  check_tensor(operation, "words", words, DType::kFloat64, {rank_word::kCount + losses});
  const double* in = input.data<double>();
  double* out = words.data<double>();
  if (check_devices(operation, {{"statistics", statistics}, {"input", input}, {"words", words}},
                    stream)) {
    if constexpr (kCudaBuilt) return detail::pack_words_cuda(sums, in, losses, out, stream);
    fail_without_cuda(operation);
  }
  stream.run([=] { detail::pack(*sums, in, losses, out); });
}

void step_rule(const StepRuleConfig& config, TensorView input, TensorView all_words,
               TensorView state, TensorView step, TensorView report, Stream stream) {
  const char* operation = "step_rule";
  const int64_t losses = count_losses(operation, "input", input, input_word::kCount);
  check_tensor(operation, "input", input, DType::kFloat64, {-1});
  check_tensor(operation, "all_words", all_words, DType::kFloat64,
               {-1, rank_word::kCount + losses});
  check_tensor(operation, "report", report, DType::kFloat64, {report_word::kCount + losses});
  const detail::StepRuleJob job{.config = config,
                                .input = input.data<double>(),
                                .all_words = all_words.data<double>(),
                                .ranks = all_words.size(0),
                                .losses = losses,
                                .state = check_bytes<StepState>(operation, "state", state),
                                .step = check_bytes<AdamWStep>(operation, "step", step),
                                .report = report.data<double>()};
  if (check_devices(operation,
                    {{"input", input},
                     {"all_words", all_words},
                     {"state", state},
                     {"step", step},
                     {"report", report}},
                    stream)) {
    if constexpr (kCudaBuilt) return detail::step_rule_cuda(job, stream);
    fail_without_cuda(operation);
  }
  stream.run([=] { detail::run_step_rule(job); });
}

}  // namespace moiety::optim
