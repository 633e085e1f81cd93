// The decision of step_decision.h, taken on the stream's device and in its order: nothing comes to
// the host. It is one thread's work; a GPU gives the bits of the CPU, except for the payload of a
// NaN.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/optim/step_decision.h"
#include "moiety/optim/step_words.h"

namespace moiety::optim {

// words (float64 [rank_word::kCount + losses]) := the words that ranks gather, from `statistics` (a
// GradStatistics of grad_norm.h, as uint8) and `input` (float64 [input_word::kCount + losses]).
void pack_words(TensorView statistics, TensorView input, TensorView words, Stream stream);

// Decides a step. all_words, float64 [ranks, rank_word::kCount + losses], are combined in rank
// order. state is a StepState as uint8 [sizeof(StepState)], aligned to 8. step := an AdamWStep
// (adamw.h, as uint8), which is {.skip = 1} if the step is skipped. report := float64
// [report_word::kCount + losses].
void step_rule(const StepRuleConfig& config, TensorView input, TensorView all_words,
               TensorView state, TensorView step, TensorView report, Stream stream);

}  // namespace moiety::optim
