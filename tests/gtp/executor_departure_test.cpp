// Steps that leave their plan, that end by an exception, that are refused; destruction.
#include <array>

#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "tests/gtp/executor_harness.h"
#include "tests/support/error_of.h"

namespace moiety::gtp {
namespace {

const StepKey kTrain{"train", 1};

// Dense, expert, alone, unused.
TrainingSetup small(int ranks, Pace pace = Pace::kLazy) {
  TrainingSetup out;
  out.bundles = {{.name = "a", .rows = 33, .cols = 12},
                 {.name = "b", .rows = 16, .cols = 9, .experts = 2},
                 {.name = "c", .rows = 24, .cols = 5, .alone = true},
                 {.name = "d", .rows = 20, .cols = 12}};
  out.ranks = out.egtp = ranks;
  out.pace = pace;
  out.policy.latency_ns = 5000;
  out.policy.bytes_per_ns = 0.05;
  return out;
}

Program small_step() {
  TraceMaker maker(20000);
  maker.fwd(0)
      .on(1)
      .fwd(1)
      .also(2)
      .on(0)
      .cut()
      .fwd(0)
      .bwd(2)
      .wgrad(2)
      .bwd(1)
      .buffer(1)
      .bwd(0)
      .grad(1)
      .wgrad(0);
  return program_of(maker);
}

// The programs that may replace the calls from `at` on: the rest without the call there, or other
// calls before it, all of which leave no gradient open.
std::vector<Program> others(const Program& program, size_t at) {
  std::vector<Program> out;
  const auto insert = [&](std::initializer_list<ProgramCall> calls) {
    Program p = program;
    p.insert(p.begin() + static_cast<std::ptrdiff_t>(at), calls);
    out.push_back(p);
  };
  insert({{Kind::kFwd, {3}, 1, 100}});
  insert({{Kind::kRecompute, {0}, 0, 100}, {Kind::kBwd, {1}, 1, 0}});
  insert({{Kind::kGradBuffer, {3}, 0, 0}, {Kind::kGrad, {3}, 0, 0}});
  insert({{Kind::kCut, {}, 0, 0}});
  if (at < program.size() && is_consume(program[at].kind)) {
    out.push_back(program);
    out.back().erase(out.back().begin() + static_cast<std::ptrdiff_t>(at));
  }
  return out;
}

TEST(ExecutorDeparture, AtEveryPosition) {
  const Program program = small_step();
  for (const Pace pace : {Pace::kLazy, Pace::kLanes, Pace::kCallers}) {
    run_ranks(small(2, pace), [&](Rank& rank) {
      int64_t departures = 0;
      int key = 0;
      for (size_t at = 0; at <= program.size(); ++at) {
        for (const Program& other : others(program, at)) {
          const StepKey k{"train", ++key};
          for (int i = 0; i < 2; ++i) rank.step(k, program);
          rank.step(k, other);
          EXPECT_EQ(rank.executor().counts().departures, ++departures) << at;
          rank.step(k, other);
          EXPECT_TRUE(rank.executor().counts().step.planned) << at;
        }
      }
    });
  }
}

// A gradient comes when its weight has been reported: it is taken back, and reported again.
TEST(ExecutorDeparture, AfterReadiness) {
  for (const BundleId b : {0, 1, 2, 3}) {
    run_ranks(small(3), [&](Rank& rank) {
      const Program program = small_step();
      for (int i = 0; i < 2; ++i) rank.step(kTrain, program);
      Program longer = program;
      for (int i = 0; i < 2; ++i) {
        longer.push_back({Kind::kBwd, {b}, 0, 10});
        longer.push_back({Kind::kGradBuffer, {b}, 0, 0});
        longer.push_back({Kind::kGrad, {b}, 0, 0});
      }
      rank.step(kTrain, longer);
      EXPECT_EQ(rank.late[b], 1);
      EXPECT_EQ(rank.executor().counts().departures, 1);
      rank.step(kTrain, longer);
      EXPECT_EQ(rank.late[b], 0);
      EXPECT_TRUE(rank.executor().counts().step.planned);
    });
  }
}

TEST(ExecutorDeparture, ThreePlansInARowAreReplaced) {
  std::vector<std::string> warnings;
  set_log_sink([&](LogLevel level, std::string_view line) {
    if (level == LogLevel::kWarning) warnings.emplace_back(line);
  });
  run_ranks(small(2), [&](Rank& rank) {
    std::array<Program, 2> programs{small_step(), small_step()};
    programs[1].erase(programs[1].begin());
    // A step as planned in between makes it start anew.
    for (int i = 0; i < 3; ++i) rank.step(kTrain, programs[i % 2]);
    rank.step(kTrain, programs[0]);
    EXPECT_TRUE(rank.executor().counts().step.planned);
    for (int i = 1; i <= 3; ++i) {
      rank.step(kTrain, programs[i % 2]);
      EXPECT_NE(rank.executor().plan_of(kTrain), nullptr);
    }
    EXPECT_EQ(rank.executor().counts().departures, 5);
    rank.step(kTrain, programs[0]);
    EXPECT_EQ(rank.executor().counts().departures, 6);
    EXPECT_EQ(rank.executor().plan_of(kTrain), nullptr);
    for (int i = 0; i < 3; ++i) {
      rank.step(kTrain, programs[i % 2]);
      EXPECT_FALSE(rank.executor().counts().step.planned);
    }
    EXPECT_EQ(rank.executor().counts().departures, 6);
    // Other keys are as before.
    for (int i = 0; i < 2; ++i) rank.step({"other", 1}, programs[0]);
    EXPECT_TRUE(rank.executor().counts().step.planned);
  });
  set_log_sink({});
  ASSERT_EQ(warnings.size(), 2u);  // one a rank
  EXPECT_NE(warnings[0].find("steps of train 1 left their plan 4 times in a row"),
            std::string::npos);
}

// One rank gathers what its peers do not: nobody waits.
TEST(ExecutorDeparture, OfOneRankAlone) {
  for (const Pace pace : {Pace::kLazy, Pace::kCallers}) {
    run_ranks(small(3, pace), [&](Rank& rank) {
      const Program program = small_step();
      for (int i = 0; i < 2; ++i) rank.step(kTrain, program);
      Program other = program;
      other.insert(other.begin() + 2, {Kind::kFwd, {3}, 0, 100});
      other.insert(other.begin() + 8, {Kind::kRecompute, {0, 1}, 0, 100});
      const bool alone = rank.number() == 1;
      rank.step(kTrain, alone ? other : program);
      EXPECT_EQ(rank.executor().counts().departures, alone);
      rank.step(kTrain, alone ? other : program);
      EXPECT_TRUE(rank.executor().counts().step.planned);
    });
  }
}

// Departures of random steps to other random steps.
TEST(ExecutorDeparture, Random) {
  for (uint64_t seed = 0; seed < 16; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    TrainingSetup setup = small(random.of(2, 3), static_cast<Pace>(random.of(0, 2)));
    setup.policy = random_policy(random);
    setup.policy.bytes_per_ns /= 1000;
    std::vector<Program> programs;
    for (int i = 0; i < 4; ++i) {
      const auto trace = wild_trace(random, 4);
      programs.push_back(program_of(trace, std::vector<int32_t>(trace.size(), 0)));
      // A common begin, so that steps depart late.
      const Program begin = small_step();
      programs.back().insert(programs.back().begin(), begin.begin(),
                             begin.begin() + random.of(0, 5));
    }
    std::vector<int> order;
    for (int i = 0; i < 10; ++i) order.push_back(random.of(0, 3));
    run_ranks(setup, [&](Rank& rank) {
      for (size_t i = 0; i < order.size(); ++i) {
        rank.step({"train", static_cast<int64_t>(i / 4)}, programs[order[i]]);
      }
    });
  }
}

TEST(ExecutorDeparture, AThrowBetweenAnyTwoCallsThenAGoodStep) {
  const Program program = small_step();
  for (const Pace pace : {Pace::kLazy, Pace::kLanes, Pace::kCallers}) {
    run_ranks(small(2, pace), [&](Rank& rank) {
      int64_t abandoned = 0;
      for (const bool planned : {false, true}) {
        if (planned) rank.step(kTrain, program);
        for (int stop = 0; stop <= static_cast<int>(program.size()); ++stop) {
          EXPECT_THROW(rank.calls(kTrain, program, stop), Thrown);
          EXPECT_EQ(rank.executor().counts().abandoned, ++abandoned);
          EXPECT_EQ(rank.voided, abandoned - 1);
          rank.step({planned ? "train" : "first", stop}, program);
          EXPECT_EQ(rank.voided, abandoned);
        }
        rank.step(kTrain, program);
        EXPECT_EQ(rank.executor().counts().step.planned, planned);
      }
    });
  }
}

TEST(ExecutorDeparture, DestructionWithWorkInFlight) {
  for (const int stop : {-1, 3, 8}) {
    run_ranks(small(2), [&](Rank& rank) {
      rank.step(kTrain, small_step());
      if (stop < 0) {
        rank.calls(kTrain, small_step());
      } else {
        EXPECT_THROW(rank.calls(kTrain, small_step(), stop), Thrown);
      }
      rank.drop_executor();
    });
  }
}

TEST(ExecutorDeparture, ViewsAreGoodUntilTheNextCall) {
  run_ranks(small(2), [&](Rank& rank) {
    for (int i = 0; i < 2; ++i) {
      const StepScope scope = rank.executor().begin_step(kTrain, rank.caller(0));
      const View a = rank.executor().materialize(0, Phase::kFwd, {}, rank.caller(0));
      rank.executor().materialize(2, Phase::kFwd, {}, rank.caller(0));
      rank.executor().flush(rank.caller(0));
      rank.synchronize();
      EXPECT_EQ(*static_cast<const uint16_t*>(a.data.raw()), 0xFFFF);
    }
  });
}

TEST(ExecutorDeparture, RefusesCallsOutOfOrder) {
  run_ranks(small(2), [&](Rank& rank) {
    Executor& x = rank.executor();
    const Stream& s = rank.caller(0);
    EXPECT_EQ(moiety::error_of([&] { x.flush(s); }), "gtp executor: flush before a step");
    EXPECT_EQ(moiety::error_of([&] { x.materialize(0, Phase::kFwd, {}, s); }),
              "gtp executor: materialize of bundle 0 outside of a step");
    rank.step(kTrain, small_step());
    const auto in_step = [&](auto&& f) {
      const StepScope scope = x.begin_step(kTrain, s);
      x.materialize(0, Phase::kFwd, {}, s);
      return moiety::error_of(f);
    };
    EXPECT_EQ(in_step([&] {
                (void)x.begin_step({"eval", 2}, s);
              }),
              "gtp executor: step eval 2 begins before the flush of train 1");
    EXPECT_EQ(in_step([&] { x.reduce(1, s); }),
              "gtp executor: reduce of bundle b at position 2 without a grad_buffer");
    EXPECT_EQ(in_step([&] {
                x.grad_buffer(1, s);
                x.grad_buffer(1, s);
              }),
              "gtp executor: grad_buffer of bundle b at position 3, that of position 2 was not "
              "reduced");
    EXPECT_EQ(in_step([&] {
                x.grad_buffer(1, s);
                x.flush(s);
              }),
              "gtp executor: flush at position 3, but the grad_buffer of bundle b at position 2 "
              "was not reduced");
    EXPECT_EQ(in_step([&] {
                const BundleId twice[] = {1, 1};
                View views[2];
                x.materialize(twice, Phase::kFwd, {}, views, s);
              }),
              "gtp executor: materialize names bundle b twice at position 2");
    EXPECT_EQ(in_step([&] { x.materialize(9, Phase::kFwd, {}, s); }),
              "gtp executor: materialize of bundle 9 at position 2, of 4 bundles");
    rank.step(kTrain, small_step());
    EXPECT_TRUE(x.counts().step.planned);
  });
}

// Ranks that record different steps are told so, all of them.
TEST(ExecutorDeparture, RanksThatRecordDifferentSteps) {
  std::vector<std::string> errors(2);
  comm::run_thread_ranks(2, {.deadline = Seconds(60)}, [&](comm::Communicator& world) {
    Rank rank(world, small(2));
    TraceMaker maker;
    maker.fwd(0).fwd(world.rank() == 0 ? 1 : 3);
    errors[world.rank()] = moiety::error_of([&] { rank.calls(kTrain, program_of(maker)); });
  });
  for (const std::string& e : errors) {
    EXPECT_EQ(e,
              "gtp: the traces of step train 1 differ in events 0 to 255: event 2 is forward of "
              "bundle 1, 0 ns on rank 0, forward of bundle 3, 0 ns on rank 1");
  }
}

}  // namespace
}  // namespace moiety::gtp
