// The combination of words into statistics and of decisions into words, which step_rule does on
// either device. Internal to moiety/optim.
#pragma once

#include "moiety/optim/adamw.h"
#include "moiety/optim/grad_norm.h"
#include "moiety/optim/step_rule.h"

namespace moiety::optim::detail {

// Pointers to the checked arguments.
struct StepRuleJob {
  StepRuleConfig config;
  const double* input;
  const double* all_words;
  int64_t ranks;
  int64_t losses;
  StepState* state;
  AdamWStep* step;
  double* report;
};

MOIETY_HD inline void pack(const GradStatistics& x, const double* input, int64_t losses,
                           double* words) {
  namespace in = input_word;
  namespace out = rank_word;
  words[out::kSumsq] = x.sumsq;
  for (int c = 0; c < kParameterClasses; ++c) words[out::kClassSumsq + c] = x.class_sumsq[c];
  words[out::kBad] = static_cast<double>(x.bad) + input[in::kBad];
  words[out::kBadParameter] = static_cast<double>(x.bad_parameter);
  words[out::kTokens] = input[in::kTokens];
  words[out::kOverflow] = input[in::kOverflow];
  words[out::kRequired] = input[in::kRequired];
  words[out::kFlags] = input[in::kFlags];
  for (int64_t i = 0; i < losses; ++i) words[out::kCount + i] = input[in::kCount + i];
}

// Combines in rank order, so that all ranks hold the same bits; the losses' sums go to the report.
MOIETY_HD inline StepStatistics combine(const StepRuleJob& job) {
  namespace word = rank_word;
  StepStatistics out;
  job.report[report_word::kStood] = 0;
  double* losses = job.report + report_word::kCount;
  for (int64_t i = 0; i < job.losses; ++i) losses[i] = 0;
  for (int64_t r = 0; r < job.ranks; ++r) {
    const double* x = job.all_words + r * (word::kCount + job.losses);
    out.sumsq += x[word::kSumsq];
    for (int c = 0; c < kParameterClasses; ++c) out.class_sumsq[c] += x[word::kClassSumsq + c];
    out.bad += static_cast<int64_t>(x[word::kBad]);
    const auto bad_parameter = static_cast<int64_t>(x[word::kBadParameter]);
    if (bad_parameter >= 0 && (out.bad_parameter < 0 || bad_parameter < out.bad_parameter)) {
      out.bad_parameter = bad_parameter;
      out.bad_rank = r;
    }
    out.tokens += static_cast<int64_t>(x[word::kTokens]);
    out.overflow |= x[word::kOverflow] != 0;
    out.required = std::max(out.required, static_cast<int64_t>(x[word::kRequired]));
    out.flags |= static_cast<uint32_t>(x[word::kFlags]);
    for (int64_t i = 0; i < job.losses; ++i) losses[i] += x[word::kCount + i];
  }
  out.has_loss = job.losses > 0;
  if (out.has_loss) out.loss = losses[0];
  return out;
}

MOIETY_HD inline void write_report(const StepRuleJob& job, const StepStatistics& x,
                                   const StepDecision& d) {
  namespace word = report_word;
  double* out = job.report;
  out[word::kNorm] = d.norm;
  for (int c = 0; c < kParameterClasses; ++c) {
    out[word::kClassNorm + c] = d.scale * std::sqrt(x.class_sumsq[c]);
  }
  out[word::kCoef] = d.coef;
  out[word::kSkip] = d.skip;
  out[word::kHalt] = d.halt;
  out[word::kSkipsInRow] = job.state->skips_in_row;
  out[word::kBad] = static_cast<double>(x.bad);
  out[word::kBadParameter] = static_cast<double>(x.bad_parameter);
  out[word::kBadRank] = static_cast<double>(x.bad_rank);
  out[word::kT] = static_cast<double>(job.state->t);
  out[word::kLr] = job.input[input_word::kLr];
  out[word::kTokens] = static_cast<double>(x.tokens);
  out[word::kOverflow] = x.overflow;
  out[word::kRequired] = static_cast<double>(x.required);
  out[word::kFlags] = x.flags;
}

MOIETY_HD inline void run_step_rule(const StepRuleJob& job) {
  const StepStatistics statistics = combine(job);
  const StepDecision d = decide(job.config, job.input[input_word::kClip], statistics, *job.state);
  write_report(job, statistics, d);
  *job.step = {.skip = 1};
  if (d.skip) return;
  *job.step = {.s = d.s,
               .k1 = d.k1,
               .k2 = d.k2,
               .lr = static_cast<float>(job.input[input_word::kLr]),
               .wd = static_cast<float>(job.input[input_word::kWeightDecay]),
               .t = static_cast<uint32_t>(job.state->t)};
}

void pack_words_cuda(const GradStatistics* statistics, const double* input, int64_t losses,
                     double* words, const Stream& stream);
void step_rule_cuda(const StepRuleJob& job, const Stream& stream);

}  // namespace moiety::optim::detail
