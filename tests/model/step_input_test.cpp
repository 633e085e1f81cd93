#include "moiety/model/step_input.h"

#include <gtest/gtest.h>

#include "tests/support/error_of.h"
#include "tests/support/tensors.h"

namespace moiety::model {
namespace {

namespace word = optim::input_word;

// Sums of two MoE layers, of which the second overflowed.
StepSums sums_of_two_layers() {
  StepSums sums(2, 4, Device{});
  for (int64_t i = 0; i < kStepLosses; ++i) put(sums.loss_3(), i, 1.5 * double(i + 1));
  sums.count_2().data<int64_t>()[0] = 96;
  int64_t* const layers = sums.layer_L4().data<int64_t>();
  layers[kLayerRequired] = 70;
  layers[kLayerWords + kLayerRequired] = 50;
  layers[kLayerWords + kLayerOverflow] = 1;
  return sums;
}

TEST(StepInput, SetsWhatTheModelKnowsAndLeavesTheRest) {
  const StepSums sums = sums_of_two_layers();
  const Tensor words(DType::kFloat64, {kStepInputWords});
  fill(words, -7);
  set_step_input(sums, true, words, Stream());
  std::vector<double> expected(kStepInputWords, -7);
  expected[word::kTokens] = 96;
  expected[word::kOverflow] = 1;
  expected[word::kRequired] = 70;
  for (int64_t i = 0; i < kStepLosses; ++i) expected[word::kCount + i] = 1.5 * double(i + 1);
  EXPECT_EQ(values(words), expected);
}

TEST(StepInput, DropsThatAreAllowedAreNoOverflow) {
  const StepSums sums = sums_of_two_layers();
  const Tensor words(DType::kFloat64, {kStepInputWords});
  set_step_input(sums, false, words, Stream());
  EXPECT_EQ(get(words, word::kOverflow), 0);
}

TEST(StepInput, RunsInTheOrderOfTheStream) {
  const StepSums sums = sums_of_two_layers();
  const Tensor words(DType::kFloat64, {kStepInputWords});
  const Stream stream = Stream::deferred();
  set_step_input(sums, true, words, stream);
  sums.count_2().data<int64_t>()[0] = 32;
  stream.synchronize();
  EXPECT_EQ(get(words, word::kTokens), 32);
}

TEST(StepInput, NamesWordsThatDoNotFit) {
  const Tensor words(DType::kFloat64, {kStepInputWords - 1});
  EXPECT_EQ(error_of([&] { set_step_input(sums_of_two_layers(), true, words, Stream()); }),
            "step_input: words is float64[10], expected float64[11]");
}

}  // namespace
}  // namespace moiety::model
