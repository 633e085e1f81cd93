// Delayed scaling in a training through the library alone: checkpoints, layouts, and what leaves no
// trace. (tests/apps/delayed_scaling_test.cpp does the same through the program, and more.)
#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/comm/thread_group.h"
#include "moiety/train/amax_histories.h"
#include "moiety/train/checkpoints.h"
#include "moiety/train/precision.h"
#include "moiety/train/rank_model.h"
#include "moiety/train/train.h"
#include "tests/data/data_helpers.h"
#include "tests/train/tiny_config.h"

namespace moiety::train {
namespace {

class Losses final : public Observer {
 public:
  void step(const StepRecord& r, const StepWork&) override { losses[r.step] = r.loss; }
  void event(std::string_view name, int64_t step, const JsonLine&) override {
    if (name == "skip") skips.push_back(step);
  }
  std::map<int64_t, double> losses;
  std::vector<int64_t> skips;
};

TrainConfig delayed(const std::string& directory, int64_t ranks = 1) {
  TrainConfig c = tiny_config(directory, ranks);
  c.model.vocab = 272;
  c.model.kv_heads = 4;
  c.train.steps = 8;
  c.checkpoint = {.interval = 1, .keep_last = 20};
  c.precision.recipe = Recipe::kFp8Tensor;
  c.precision.scaling = Scaling::kDelayed;
  c.precision.amax_history = 4;
  return c;
}

void run(const TrainConfig& config, Losses& heard) {
  TrainingPlan plan = make_plan(config);
  plan.train = data::synthetic_source("markov", config.data.seq_len, 264, config.run.seed);
  plan.valid = data::synthetic_source("markov", config.data.seq_len, 264, 77);
  plan.resume_from = resume_candidates(config);
  plan.observer = &heard;
  comm::run_thread_ranks(int(config.run.ranks), {}, [&](comm::Communicator& world) {
    set_thread_budget(1);
    train(plan, world);
  });
}
Losses run(const TrainConfig& config) {
  Losses heard;
  run(config, heard);
  return heard;
}

// Goes on from a step of another run.
Losses go_on(TrainConfig config, const std::string& checkpoint) {
  config.run.resume = ResumeFrom::kPath;
  config.run.checkpoint = checkpoint;
  return run(config);
}

std::string at(const TrainConfig& config, int64_t step) {
  return config.checkpoints() + text("/step-{:08}", step);
}

std::map<std::string, uint64_t> digests(const std::string& path, bool histories_alone = false) {
  std::map<std::string, uint64_t> all;
  for (const auto& [name, tensor] : checkpoint::read_manifest(path).tensors) {
    for (const auto& [slot, entry] : tensor.slots) {
      if (histories_alone && slot != kHistorySlot) continue;
      all[slot + "/" + name] = entry.digest;
    }
  }
  return all;
}

struct Layout {
  std::string name;
  int64_t ranks;
  ParallelSettings parallel;
};
const std::vector<Layout> kLayouts{{"dp2", 2, {}},
                                   {"tp2", 2, {.tp = 2}},
                                   {"ep2", 2, {.ep = 2}},
                                   {"gtp2", 2, {.gtp = 2, .egtp = 2}},
                                   {"tp2ep2", 4, {.tp = 2, .ep = 2}},
                                   {"gtp2ep2", 4, {.gtp = 2, .ep = 2, .egtp = 2}}};

TrainConfig under(const std::string& directory, const Layout& layout) {
  TrainConfig c = delayed(directory, layout.ranks);
  c.parallel = layout.parallel;
  c.train.micro_batch *= layout.parallel.tp;
  return c;
}

void expect_near(const Losses& some, const Losses& all, const std::string& what) {
  ASSERT_FALSE(some.losses.empty()) << what;
  for (const auto& [step, loss] : some.losses) {
    EXPECT_NEAR(loss, all.losses.at(step), 0.005 * loss) << what << " step " << step;
  }
}

TEST(DelayedTraining, ResumesBitwiseAndUnderOtherLayouts) {
  const TemporaryDirectory dir;
  const TrainConfig whole = under(dir / "whole", kLayouts[2]);
  const Losses all = run(whole);
  ASSERT_EQ(all.losses.size(), 8u);
  for (const int64_t step : {2, 5}) {  // histories that are not full, and that are
    const TrainConfig again = under(dir / text("{}", step), kLayouts[2]);
    const Losses rest = go_on(again, at(whole, step));
    ASSERT_EQ(rest.losses.begin()->first, step + 1);
    for (const auto& [s, loss] : rest.losses) EXPECT_EQ(loss, all.losses.at(s)) << s;
    EXPECT_EQ(digests(at(again, 8)), digests(at(whole, 8)));
  }
  EXPECT_EQ(digests(at(whole, 5), true).size(), 16u);  // x and dy of eight linears

  const TrainConfig one = delayed(dir / "one");
  expect_near(run(one), all, "one rank");
  expect_near(go_on(delayed(dir / "to-one"), at(whole, 5)), all, "to one rank");
  for (const Layout& layout : kLayouts) {
    expect_near(run(under(dir / layout.name, layout)), all, layout.name);
    expect_near(go_on(under(dir / (layout.name + "-rest"), layout), at(whole, 5)), all,
                "resumed under " + layout.name);
  }
}

// The histories that every rank holds after a load, whatever the layout, are those that were saved.
TEST(DelayedTraining, HistoriesAreTheSameBitsUnderEveryLayout) {
  const TemporaryDirectory dir;
  const TrainConfig saved = under(dir / "saved", kLayouts[3]);
  run(saved);
  std::vector<float> expected;
  std::vector<Layout> layouts{{"one", 1, {}}};
  layouts.insert(layouts.end(), kLayouts.begin(), kLayouts.end());
  for (const Layout& layout : layouts) {
    const TrainConfig c = under(dir / "loaded", layout);
    const Grid grid = check_layout(c);
    std::mutex mutex;
    comm::run_thread_ranks(int(layout.ranks), {}, [&](comm::Communicator& world) {
      RankModel model(c, grid, c.pass_tokens(), world);
      model.transformer().set_precision(precision_of_recipe(c, c.precision.recipe));
      load_histories(at(saved, 7), model.transformer(), world, Stream());
      std::vector<float> seen;
      for (const optim::StatePiece& p : saved_histories(model.transformer(), Stream())) {
        const auto* values = static_cast<const float*>(p.data);
        seen.insert(seen.end(), values, values + p.shape[0] * p.shape[1]);
      }
      model.close();
      const std::lock_guard lock(mutex);
      if (expected.empty()) expected = seen;
      EXPECT_TRUE(seen == expected) << layout.name;
    });
  }
  EXPECT_EQ(expected.size(), 2u * (2 * 2 + 2 * 2 * 4) * 4);
  EXPECT_GT(*std::min_element(expected.begin(), expected.end()), 0);  // seven steps fill four
}

// What is computed once more or beside the steps changes neither losses nor histories.
TEST(DelayedTraining, RecomputationAndEvaluationLeaveNoTrace) {
  const TemporaryDirectory dir;
  const TrainConfig plain = under(dir / "plain", kLayouts[2]);
  const Losses all = run(plain);
  for (const bool evaluates : {false, true}) {
    TrainConfig c = under(dir / (evaluates ? "evaluated" : "recomputed"), kLayouts[2]);
    if (evaluates) c.eval = {.every = 1, .samples = 8};
    if (!evaluates) c.model.recompute = model::Recompute::kFull;
    EXPECT_EQ(run(c).losses, all.losses);
    EXPECT_EQ(digests(at(c, 8)), digests(at(plain, 8)));
  }
}

// Steps whose gradient is not finite are skipped; the histories are those before the first of them.
TEST(DelayedTraining, SkippedStepsLeaveNoTrace) {
  const TemporaryDirectory dir;
  TrainConfig c = under(dir / "broken", kLayouts[2]);
  c.optim.lr = 1e38;
  c.optim.warmup_steps = 0;
  c.guard.max_skips = 99;
  Losses heard;
  EXPECT_THROW(run(c, heard), Error);  // its last steps were skipped: the end is in doubt
  ASSERT_FALSE(heard.skips.empty());
  const int64_t first = heard.skips[0];
  ASSERT_GT(first, 1);
  ASSERT_EQ(std::ssize(heard.skips), 9 - first);
  EXPECT_EQ(digests(at(c, 8), true), digests(at(c, first - 1), true));
}

}  // namespace
}  // namespace moiety::train
