// The executor: every view, every gradient and every report of steps on demand and as planned.
#include "moiety/gtp/executor.h"

#include "moiety/base/error.h"
#include "tests/gtp/executor_cases.h"

namespace moiety::gtp {
namespace {

const StepKey kTrain{"train", 1}, kEval{"eval", 1};

void expect_three_steps(const TrainingSetup& setup, const std::vector<Named>& programs) {
  run_ranks(setup, [&](Rank& rank) { three_steps(rank, programs); });
}

TEST(Executor, PlannedStepsAreStepsOnDemand) {
  for (const auto& [ranks, egtp] : {std::pair{2, 2}, {3, 3}, {4, 2}, {4, 1}}) {
    for (const Pace pace : {Pace::kLazy, Pace::kLanes, Pace::kCallers, Pace::kOptimizer}) {
      SCOPED_TRACE(text("{} ranks, egtp {}, pace {}", ranks, egtp, static_cast<int>(pace)));
      expect_three_steps(setup_of(ranks, egtp, pace), programs());
    }
  }
}

TEST(Executor, OverCollectives) {
  for (const Pace pace : {Pace::kLazy, Pace::kLanes}) {
    TrainingSetup setup = setup_of(4, 2, pace);
    setup.transport = TransportKind::kAllToAll;
    setup.poison = false;
    expect_three_steps(setup, programs());
  }
}

TEST(Executor, OneRankMovesNothing) {
  TrainingSetup setup = setup_of(1, 1, Pace::kLazy);
  run_ranks(setup, [&](Rank& rank) {
    for (const Named& p : programs()) {
      for (int i = 0; i < 3; ++i) rank.step({p.name, 1}, p.program);
    }
    EXPECT_EQ(rank.executor().counts().arena_bytes, 0);
    EXPECT_EQ(rank.executor().counts().step.dense.gathers, 0);
  });
}

TEST(Executor, Bf16Gradients) {
  for (const DType main : {DType::kFloat32, DType::kBFloat16}) {
    TrainingSetup setup = setup_of(2, 2, Pace::kLazy);
    for (BundleCase& b : setup.bundles) b.main = main;
    setup.wire = DType::kBFloat16;
    expect_three_steps(setup, programs());
  }
}

TEST(Executor, WeightsInFormats) {
  for (const CodecCase& c : codec_cases()) {
    SCOPED_TRACE(c.name);
    for (const int ranks : {1, 2, 3}) {
      TrainingSetup setup = setup_of(ranks, ranks, Pace::kLazy);
      setup.poison = ranks != 3;  // without it a slot keeps what an earlier step gathered
      const int64_t a = c.codec.align(), rows = a * ranks - a / 2 + 1;
      setup.bundles = {
          {.name = "dense", .rows = rows, .cols = 48, .codec = c.codec},
          {.name = "experts", .rows = a * ranks, .cols = 96, .experts = 2, .codec = c.codec},
          {.name = "alone", .rows = rows, .cols = 40, .alone = true, .codec = c.codec}};
      TraceMaker maker(20000);
      maker.fwd(0).fwd(1).fwd(2).again(1).bwd(1).also(2).wgrad(1).on(1).bwd(2).on(0).bwd(2).wgrad(
          2);
      maker.bwd(0).wgrad(0);
      expect_three_steps(setup, {{"train", program_of(maker)}});
    }
  }
}

// Random steps of random policies: whatever the planner does.
TEST(Executor, RandomSteps) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    TrainingSetup setup = setup_of(random.of(2, 4), 1, static_cast<Pace>(random.of(0, 3)));
    setup.egtp = random.chance(50) ? setup.ranks : setup.ranks == 4 ? 2 : 1;
    setup.policy = random_policy(random);
    setup.policy.bytes_per_ns /= 1000;
    setup.poison = random.chance(70);
    setup.bundles.resize(8);
    std::vector<Named> steps;
    for (const char* name : {"a", "b"}) {
      std::vector<int32_t> streams;
      std::vector<TraceEvent> trace;
      if (random.chance(70)) {
        trace = ModelTrace(random, 2, 4).make(streams);
      } else {
        trace = wild_trace(random, 8);
        streams.assign(trace.size(), 0);
      }
      steps.push_back({name, program_of(trace, streams)});
    }
    expect_three_steps(setup, steps);
  }
}

// The formulas of what travels: (G - 1) shards of the payload for each gather, (G - 1) shards of
// the wire dtype for each reduce.
TEST(Executor, CountsWhatIsMoved) {
  run_ranks(setup_of(4, 2, Pace::kLazy), [&](Rank& rank) {
    TraceMaker maker(1e6);
    maker.fwd(kQkv).fwd(kFc1).fwd(kAlone).fwd(kQkv).bwd(kFc1).wgrad(kFc1).bwd(kQkv).wgrad(kQkv);
    for (int i = 0; i < 2; ++i) rank.step(kTrain, program_of(maker));
    const StepCounts& step = rank.executor().counts().step;
    EXPECT_TRUE(step.planned);
    const int64_t qkv = 16 * 24, fc1 = 2 * 32 * 20;  // shards: 64 rows of 4 ranks, 2 * 64 of 2
    EXPECT_EQ(step.dense.gathers, 3);
    EXPECT_EQ(step.dense.gathered, 3 * 3 * 2 * qkv);
    EXPECT_EQ(step.dense.reduced, 3 * 4 * qkv);
    EXPECT_EQ(step.expert.gathers, 2);
    EXPECT_EQ(step.expert.gathered, 2 * 2 * fc1);
    EXPECT_EQ(step.expert.reduced, 4 * fc1);
  });
}

}  // namespace
}  // namespace moiety::gtp
