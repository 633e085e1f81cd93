// The model's sums in the form of the words from which an optimizer's step begins.
#pragma once

#include "moiety/base/host_device.h"
#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/model/step_stats.h"
#include "moiety/optim/step_words.h"

namespace moiety::model {

// The losses of a step: cross-entropy, aux, z.
inline constexpr int64_t kStepLosses = 3;
inline constexpr int64_t kStepInputWords = optim::input_word::kCount + kStepLosses;
inline constexpr int64_t kStepReportWords = optim::report_word::kCount + kStepLosses;

// Sets tokens (the valid targets), overflow, required and the losses in words (float64
// [kStepInputWords], on the stream's device); the other words stay. With `refuses_drops`, pairs
// that found no room are an overflow.
void set_step_input(const StepSums& sums, bool refuses_drops, TensorView words, Stream stream);

namespace detail {
struct StepInput {
  const double* loss_3;
  const int64_t* count_2;
  const int64_t* layer_L4;
  int64_t layers;
  bool refuses_drops;
  double* words;

  MOIETY_HD_INLINE void set() const {
    namespace word = optim::input_word;
    int64_t required = 0;
    bool overflow = false;
    for (int64_t l = 0; l < layers; ++l) {
      const int64_t* layer = layer_L4 + l * kLayerWords;
      required = layer[kLayerRequired] > required ? layer[kLayerRequired] : required;
      overflow = overflow || layer[kLayerOverflow] != 0;
    }
    words[word::kTokens] = static_cast<double>(count_2[0]);
    words[word::kOverflow] = refuses_drops && overflow ? 1 : 0;
    words[word::kRequired] = static_cast<double>(required);
    for (int i = 0; i < kStepLosses; ++i) words[word::kCount + i] = loss_3[i];
  }
};
void set_step_input_cuda(const StepInput& input, const Stream& stream);
}  // namespace detail

}  // namespace moiety::model
