// The step rule on a GPU has the bits of the CPU, step after step.
#include "moiety/optim/step_rule.h"

#include "moiety/base/graph.h"
#include "moiety/optim/adamw.h"
#include "moiety/optim/grad_norm.h"
#include "tests/optim_gpu/cases.h"
#include "tests/support/gpu_test.h"

namespace moiety::optim {
namespace {

class StepRuleGpu : public GpuTest {};

// The memory of one step of a group.
struct Memory {
  Memory(int64_t ranks, int64_t losses)
      : input(DType::kFloat64, {input_word::kCount + losses}),
        all(DType::kFloat64, {ranks, rank_word::kCount + losses}),
        report(DType::kFloat64, {report_word::kCount + losses}) {}
  GradStatistics statistics;
  StepState state;
  AdamWStep step;
  Tensor input, all, report;

  std::vector<TensorView> everything() {
    return {byte_view(statistics), byte_view(state), byte_view(step), input, all, report};
  }
};

double uniform(uint64_t i, uint64_t what) { return random_word(i, what) / 4294967296.0; }

// Fills the words of one rank in one step: ordinary, without tokens, with non-finite gradients, of
// huge norm, a spike, or with too small a capacity.
void fill(Memory& x, uint64_t step, uint64_t rank) {
  namespace in = input_word;
  const uint64_t i = step * 8 + rank;
  const uint32_t event = random_word(step, 1) % 16;
  x.statistics = {};
  for (int c = 0; c < kParameterClasses; ++c) {
    x.statistics.class_sumsq[c] = uniform(i, 10 + uint64_t(c)) * (event == 1 ? 1e78 : 1e4);
    x.statistics.sumsq += x.statistics.class_sumsq[c];
  }
  double* input = x.input.data<double>();
  input[in::kLr] = 1e-3 * uniform(step, 2);
  input[in::kWeightDecay] = 0.1;
  input[in::kClip] = step % 3 == 0 ? 0 : 1;
  input[in::kTokens] = event == 2 ? 0 : 100 + random_word(i, 3) % 100;
  input[in::kBad] = event == 3 && rank == 0;
  input[in::kOverflow] = event == 4 && rank % 2 == 1;
  input[in::kRequired] = random_word(i, 4);
  input[in::kFlags] = random_word(i, 5) & random_word(i, 6);
  if (event == 5 || event == 6) {
    x.statistics.bad = random_word(i, 7) % 3;
    x.statistics.bad_parameter = x.statistics.bad > 0 ? random_word(i, 8) % 4 : -1;
    if (event == 6) x.statistics.sumsq = std::nan("");
  }
  for (int64_t k = in::kCount; k < x.input.view().numel(); ++k) {
    input[k] = input[in::kTokens] * (uniform(i, 20 + uint64_t(k)) + (event == 7 ? 9 : 2));
  }
}

TEST_F(StepRuleGpu, HasTheBitsOfTheCpu) {
  for (const int64_t ranks : {1, 2, 5}) {
    for (const int64_t losses : {0, 1, 3}) {
      SCOPED_TRACE(text("{} ranks, {} losses", ranks, losses));
      const StepRuleConfig config{
          .guard = ranks == 2 ? NanGuard::kOff : NanGuard::kStep, .max_skips = 2, .spike_sigma = 3};
      Memory x(ranks, losses);
      const auto tensors = x.everything();
      const Mirror m({tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], tensors[5]},
                     stream);
      const auto pack = [&](const auto& at, int64_t r, const Stream& s) {
        pack_words(at(byte_view(x.statistics)), at(x.input), at(x.all.view().select(r)), s);
      };
      const auto rule = [&](const auto& at, const Stream& s) {
        step_rule(config, at(x.input), at(x.all), at(byte_view(x.state)), at(byte_view(x.step)),
                  at(x.report), s);
      };
      const auto here = [](const TensorView& t) { return t; };
      const Graph graph(stream, [&] { rule(m, stream); });
      int halts = 0;
      for (uint64_t step = 0; step < 500; ++step) {
        for (int64_t r = 0; r < ranks; ++r) {
          fill(x, step, static_cast<uint64_t>(r));
          copy(m(byte_view(x.statistics)), byte_view(x.statistics), stream);
          copy(m(x.input), x.input, stream);
          pack(m, r, stream);
          pack(here, r, Stream());
        }
        rule(here, Stream());
        step % 2 ? rule(m, stream) : graph.launch(stream);
        ASSERT_EQ(difference(m, "words", x.all), "") << step;
        ASSERT_EQ(difference(m, "report", x.report), "") << step;
        ASSERT_EQ(m.difference("step", byte_view(x.step)), "") << step;
        ASSERT_EQ(m.difference("state", byte_view(x.state)), "") << step;
        if (!x.state.halt) continue;
        ++halts;  // the host clears it
        x.state.halt = x.state.skips_in_row = 0;
        copy(m(byte_view(x.state)), byte_view(x.state), stream);
      }
      EXPECT_GT(halts, 0);
      EXPECT_GT(x.state.t, 200);
      EXPECT_EQ(x.state.loss_count, losses > 0 ? x.state.t : 0);
    }
  }
}

}  // namespace
}  // namespace moiety::optim
