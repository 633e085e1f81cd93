// Trainings that differ in how tokens travel among expert-parallel ranks, and in what is kept or
// put off: no bit may differ.
#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/data/sample_source.h"
#include "moiety/train/train.h"
#include "tests/support/pairwise.h"
#include "tests/train/tiny_config.h"

namespace moiety::train {

struct ExchangeCase {
  moe::ZeroCopy zero_copy = moe::ZeroCopy::kOff;
  int64_t depth = 2;
  moe::Overlap overlap = moe::Overlap::kNone;
  bool delay_wgrad = false;
  model::Recompute recompute = model::Recompute::kNone;
  moe::RowLayout layout = moe::RowLayout::kExpert;
  std::string describe() const {
    return text("zero-copy {}, depth {}, overlap {}, delayed {}, recompute {}, rows {}",
                int(zero_copy), depth, int(overlap), delay_wgrad, int(recompute), name(layout));
  }
};

// Every pair of values of any two settings, and first the defaults.
inline std::vector<ExchangeCase> exchange_cases() {
  std::vector<ExchangeCase> out{{}};
  const model::Recompute recomputes[] = {model::Recompute::kNone, model::Recompute::kMoe};
  for (const auto& r : pairwise_cover({2, 3, 4, 2, 2, 2})) {
    const auto overlap = static_cast<moe::Overlap>(r[2]);
    const bool turns = overlap == moe::Overlap::kMicroBatch;
    out.push_back({.zero_copy = r[0] ? moe::ZeroCopy::kAuto : moe::ZeroCopy::kOff,
                   .depth = turns && r[1] == 0 ? 8 : 1 + r[1],
                   .overlap = overlap,
                   .delay_wgrad = r[3] != 0,
                   .recompute = recomputes[r[4]],
                   .layout = r[5] ? moe::RowLayout::kRank : moe::RowLayout::kExpert});
  }
  return out;
}

// Two MoE layers with a shared expert on `ranks` expert-parallel ranks; two micro-steps a step. The
// capacity is short at first, so steps are made again, with more rows.
inline TrainConfig exchange_config(const std::string& directory, int ranks,
                                   moe::Reduction combine) {
  TrainConfig c = tiny_config(directory, ranks);
  c.model.shared_d_ffn = 16;
  c.model.shared_gate = true;
  c.model.router.experts = 12;  // which 2, 3 and 4 ranks share
  c.model.combine = combine;
  c.parallel.ep = ranks;
  c.train.steps = 4;
  c.train.micro_batch = 2;
  c.train.global_batch = 4 * ranks;
  c.eval = {.every = 2, .samples = 4};
  return c;
}

inline void set(TrainConfig& c, const ExchangeCase& x) {
  c.ep = {.zero_copy = x.zero_copy, .depth = x.depth};
  c.model.overlap = x.overlap;
  c.model.delay_wgrad = x.delay_wgrad;
  c.model.recompute = x.recompute;
  c.model.row_layout = x.layout;
}

class Losses final : public Observer {
 public:
  void step(const StepRecord& r, const StepWork&) override {
    values.insert(values.end(), {r.loss, r.grad_norm});
  }
  void evaluated(int64_t, const EvaluationResult& result, double) override {
    values.push_back(result.loss);
  }
  void say(LogLevel, const std::string& line) override {
    if (line.find("made again") != std::string::npos) ++made_again;
  }
  std::vector<double> values;
  int made_again = 0;
};

// The losses of a run in which a step is to be made again, if `again` says so.
inline std::vector<double> losses_of(const TrainConfig& config, comm::Communicator& world,
                                     bool again = true) {
  TrainingPlan plan = make_plan(config);
  plan.train = data::synthetic_source("markov", config.data.seq_len, 264, config.run.seed);
  plan.valid = data::synthetic_source("markov", config.data.seq_len, 264, 77);
  Losses heard;
  if (world.rank() == 0) plan.observer = &heard;
  train(plan, world);
  if (again && world.rank() == 0 && world.size() == 2) {
    EXPECT_EQ(heard.made_again, 1);
  }
  return heard.values;
}

}  // namespace moiety::train
