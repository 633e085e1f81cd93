// Training with experts divided among ranks that are threads and share a GPU, through the program:
// against one rank, against CPU ranks, captured against eager, and across layouts.
#include "tests/apps_gpu/late_data.h"
#include "tests/apps_gpu/ranks_on_gpu.h"

namespace moiety::app {
namespace {

constexpr Ranks kEp2{"ep2", 2, 1, 2}, kEp4{"ep4", 4, 1, 4}, kEp2Dp2{"ep2.dp2", 4, 1, 2},
    kEp2Tp2{"ep2.tp2", 2, 2, 2}, kEp4Tp2Dp2{"ep4.tp2.dp2", 4, 2, 4},
    kEp2Tp2Dp2{"ep2.tp2.dp2", 4, 2, 2};

const Arguments kWide{"--model.d_model=256",    "--model.d_ffn_dense=256", "--moe.shared_d_ffn=256",
                      "--moe.d_ffn=128",        "--train.steps=8",         "--optim.lr=0.001",
                      "--checkpoint.interval=0"};

class ExpertParallelGpu : public RanksOnGpu {
 protected:
  // The lines of a run's output that say that a step was made again.
  static int repetitions(const ProgramResult& result) {
    int n = 0;
    for (size_t at = 0; (at = result.err.find("is made again", at)) != std::string::npos; ++at) ++n;
    return n;
  }
};

// The rate is low enough for choices of experts to be the same.
TEST_F(ExpertParallelGpu, TrainsAsOne) {
  const Arguments gentle = kOnGpu + kLonger + Arguments{"--optim.lr=0.002"};
  train_at("one", kOne, gentle);
  for (const Ranks& r : {kEp2, kEp4, kEp2Dp2, kEp2Tp2, kEp4Tp2Dp2, kEp2Tp2Dp2}) {
    train_at(r.name, r, gentle);
    expect_near(at(r.name), at("one"), 1e-4);
  }
}

TEST_F(ExpertParallelGpu, TrainsAsCpuRanks) {
  const Arguments gentle = kLonger + Arguments{"--optim.lr=0.002"};
  for (const Ranks& r : {kEp2, kEp2Tp2}) {
    train_at(text("gpu-{}", r.name), r, kOnGpu + gentle);
    train_at(text("cpu-{}", r.name), r, kOnCpu + gentle);
    expect_near(at(text("gpu-{}", r.name)), at(text("cpu-{}", r.name)), 1e-4);
  }
}

TEST_F(ExpertParallelGpu, CapturedStepsAreEagerOnesAndTwoRunsAreEqual) {
  for (const Ranks& r : {kEp2, kEp4, kEp2Dp2, kEp2Tp2Dp2}) expect_captured_is_eager(r);
}

TEST_F(ExpertParallelGpu, AStepNeitherAllocatesNorWaits) {
  const Arguments direct{"--ep.zero_copy=auto", "--precision.recipe=bf16"};
  struct Case {
    std::string name;
    Ranks ranks;
    Arguments more;
  };
  for (const Case& c : {Case{"eager", kEp2, kEager}, Case{"captured", kEp2, kCaptured},
                        Case{"many", kEp2Tp2Dp2, kCaptured}, Case{"direct", kEp2, direct}}) {
    train_at(
        c.name, c.ranks,
        kOnGpu + c.more +
            Arguments{"--train.steps=8", "--checkpoint.interval=0", "--moe.capacity_factor=-1"});
    for (const auto& [step, record] : steps(at(c.name))) {
      EXPECT_GT(record["exposed_ms"]["ep"], 0) << c.name << " " << step;
      if (step == 1) continue;  // finds out how much memory a step takes
      EXPECT_EQ(record["host_waits"], 0) << c.name << " " << step;
      EXPECT_EQ(record["allocations"], 0) << c.name << " " << step;
    }
  }
}

// All kinds of recipes, and rows that travel quantized; choices of experts part in the end.
TEST_F(ExpertParallelGpu, RecipesAreNearOneRank) {
  struct Case {
    const char *recipe, *dispatch;
  };
  for (const Case& c : {Case{"bf16", "auto"}, Case{"fp8_tensor", "auto"}, Case{"fp8_block", "auto"},
                        Case{"fp8_block", "fp8_block"}, Case{"mxfp8", "mxfp8"},
                        Case{"bf16", "mxfp8"}, Case{"nvfp4", "auto"}}) {
    const std::string name = text("{}-{}", c.recipe, c.dispatch);
    const Arguments more = kOnGpu + kWide +
                           Arguments{text("--precision.recipe={}", c.recipe),
                                     text("--precision.dispatch={}", c.dispatch)};
    train_at("one-" + name, kOne, more);
    for (const Ranks& r : {kEp2, kEp2Tp2}) {
      train_at(text("{}-{}", r.name, name), r, more);
      expect_losses_near(at(text("{}-{}", r.name, name)), at("one-" + name), 0.02);
    }
    train_at("eager-" + name, kEp2, more + kEager);
    expect_equal("eager-" + name, text("ep2-{}", name));
  }
}

TEST_F(ExpertParallelGpu, TheRecipeChangesOnTheWay) {
  const Arguments more =
      kOnGpu + kWide + Arguments{"--precision.recipe=mxfp8", "--precision.switch_step=4"};
  train_at("captured", kEp2, more);
  train_at("eager", kEp2, more + kEager);
  expect_equal("captured", "eager");
}

// What is computed beside an exchange, and the order of sums, change no bit of a captured step.
TEST_F(ExpertParallelGpu, OverlapsChangeNothing) {
  const Arguments bf16 =
      kOnGpu + Arguments{"--train.steps=12", "--precision.recipe=bf16", "--checkpoint.interval=0"};
  for (const Ranks& r : {kEp2, kEp2Dp2}) {
    const auto named = [&](const std::string& what) { return text("{}-{}", what, r.name); };
    train_at(named("none"), r, bf16 + Arguments{"--ep.overlap=none"});
    for (const char* overlap : {"shared", "wgrad"}) {
      train_at(named(overlap), r, bf16 + Arguments{text("--ep.overlap={}", overlap)});
      expect_equal(named(overlap), named("none"));
      const std::string delayed = text("{}-delayed", overlap);
      train_at(named(delayed), r,
               bf16 + Arguments{text("--ep.overlap={}", overlap), "--moe.delay_wgrad"});
      expect_equal(named(delayed), named("none"));
    }
    train_at(named("left"), r, bf16 + Arguments{"--ep.overlap=wgrad", "--ep.comm_sms=16"});
    expect_equal(named("left"), named("none"));
    for (const char* recipe : {"bf16", "mxfp8"}) {
      const Arguments rows{text("--precision.recipe={}", recipe), "--train.steps=6"};
      train_at(named(text("expert-{}", recipe)), r, bf16 + rows + Arguments{"--moe.layout=expert"});
      train_at(named(text("rank-{}", recipe)), r, bf16 + rows + Arguments{"--moe.layout=rank"});
      expect_equal(named(text("rank-{}", recipe)), named(text("expert-{}", recipe)));
    }
    for (const char* recompute : {"moe", "full"}) {
      train_at(named(recompute), r, bf16 + Arguments{text("--memory.recompute={}", recompute)});
      expect_equal(named(recompute), named("none"));
    }
  }
}

// Rows that peers store into their slots, and outputs that they read, give the bits of staged ones:
// captured and eager, with recipes that quantize what came, and with room that grows on the way.
TEST_F(ExpertParallelGpu, RowsWherePeersReachThemChangeNothing) {
  const Arguments steps = kOnGpu + Arguments{"--train.steps=8", "--checkpoint.interval=0"};
  const Arguments direct{"--ep.zero_copy=auto"};
  struct Case {
    const char* name;
    Ranks ranks;
    Arguments more;
  };
  const Case cases[] = {
      {"bf16", kEp2, {"--precision.recipe=bf16"}},
      {"token", kEp2Dp2, {"--precision.recipe=bf16", "--moe.combine=token"}},
      {"mxfp8", kEp2, {"--precision.recipe=mxfp8"}},
      {"codes", kEp2, {"--precision.recipe=mxfp8", "--precision.dispatch=mxfp8"}},
      {"maps", kEp2, {"--precision.recipe=bf16", "--moe.layout=rank"}},
      {"recomputed", kEp2Tp2, {"--precision.recipe=bf16", "--memory.recompute=moe"}},
      {"beside", kEp2, {"--precision.recipe=bf16", "--ep.overlap=shared"}},
      {"grown",
       kEp2,
       {"--precision.recipe=bf16", "--router.aux=none", "--router.bias_rate=0", "--moe.top_k=1",
        "--init.std=0.2", "--optim.lr=0.04", "--train.steps=24"}}};
  for (const Case& c : cases) {
    const auto named = [&](const char* how) { return text("{}-{}", how, c.name); };
    const Arguments more = steps + (c.name == std::string("mxfp8") ? kWide : Arguments{}) + c.more;
    train_at(named("staged"), c.ranks, more);
    train_at(named("direct"), c.ranks, more + direct);
    expect_equal(named("direct"), named("staged"));
    train_at(named("eager"), c.ranks, more + direct + kEager);
    expect_equal(named("eager"), named("staged"));
  }
}

// Steps whose rows do not fit are made again with more room, on all ranks alike; the losses are
// those of a run that has had it from the start.
TEST_F(ExpertParallelGpu, TooLittleRoomChangesNothing) {
  const Arguments more =
      kOnGpu + Arguments{"--router.aux=none",      "--router.bias_rate=0", "--moe.top_k=1",
                         "--init.std=0.2",         "--optim.lr=0.04",      "--train.steps=24",
                         "--checkpoint.interval=0"};
  for (const Ranks& r : {kEp2, kEp2Dp2, kEp4Tp2Dp2}) {
    for (const Arguments& how : {kEager, kCaptured}) {
      const std::string name = text("{}-{}", r.name, how == kEager ? "eager" : "captured");
      const ProgramResult grown = run(model(name + "-grown", r) + more + how);
      ASSERT_EQ(grown.code, kExitDone) << grown.err;
      EXPECT_GT(repetitions(grown), 1) << name;
      const ProgramResult ample =
          run(model(name + "-ample", r) + more + how + Arguments{"--moe.capacity_factor=-1"});
      ASSERT_EQ(ample.code, kExitDone) << ample.err;
      EXPECT_EQ(repetitions(ample), 0) << name;
      expect_equal(name + "-grown", name + "-ample");
    }
  }
}

// Each policy, as on CPU ranks.
TEST_F(ExpertParallelGpu, AGivenCapacityDropsOrStops) {
  const Arguments half{"--moe.capacity_factor=0.5", "--optim.lr=0.002", "--checkpoint.interval=0"};
  const ProgramResult error = run(model("error", kEp2) + kOnGpu + half);
  EXPECT_EQ(error.code, kExitUsage) << error.err;
  EXPECT_NE(error.last_line().find("moe.capacity_factor: an expert-parallel rank needs "),
            std::string::npos)
      << error.err;
  for (const char* policy : {"drop", "report"}) {
    const Arguments more = half + Arguments{text("--moe.overflow={}", policy)};
    const auto named = [&](const char* how) { return text("{}-{}", how, policy); };
    train_at(named("cpu"), kEp2, kOnCpu + more);
    train_at(named("eager"), kEp2, kOnGpu + kEager + more);
    train_at(named("captured"), kEp2, kOnGpu + kCaptured + more);
    expect_near(at(named("captured")), at(named("cpu")), 1e-4);
    expect_equal(named("captured"), named("eager"));
    const auto cpu = steps(at(named("cpu")));
    for (const auto& [step, r] : steps(at(named("captured")))) {
      EXPECT_GT(r["drop"], 0) << step;
      EXPECT_EQ(r["drop"], cpu.at(step)["drop"]) << step;
    }
  }
}

TEST_F(ExpertParallelGpu, EvaluatesAsOne) {
  const std::string tokens = write_tokens(dir / "a.tok", {ramp(900), ramp(300, 7)});
  const Arguments more = kOnGpu + Arguments{"--data.synthetic=none",
                                            "--data.train=[\"" + tokens + "\"]",
                                            "--data.valid=[\"" + tokens + "\"]",
                                            "--eval.every=3",
                                            "--eval.samples=12",
                                            "--train.steps=9",
                                            "--optim.lr=0.002",
                                            "--checkpoint.interval=0"};
  train_at("one", kOne, more);
  for (const Ranks& r : {kEp2, kEp2Tp2}) {
    train_at(r.name, r, more);
    expect_near(at(r.name), at("one"), 1e-4);
    const auto one = events(at("one"), "eval"), many = events(at(r.name), "eval");
    ASSERT_EQ(one.size(), many.size());
    for (size_t i = 0; i < one.size(); ++i) {
      const double expected = one[i]["loss"].get<double>();
      EXPECT_NEAR(many[i]["loss"].get<double>(), expected, 1e-4 * expected);
    }
  }
}

// At a rate of 0 weights stay what they were.
TEST_F(ExpertParallelGpu, CheckpointsMoveBetweenLayoutsAndDevices) {
  const Arguments each{"--checkpoint.interval=3", "--checkpoint.keep_last=10"};
  const Arguments still{"--optim.lr=0", "--optim.min_lr=0", "--optim.weight_decay=0",
                        "--train.steps=4"};
  struct To {
    Ranks ranks;
    Arguments where;
  };
  for (const Ranks& from : {kEp2, kEp2Tp2Dp2}) {
    const std::string whole = text("from-{}", from.name);
    train_at(whole, from, kOnGpu + each);
    for (const To& to : {To{kOne, kOnGpu}, To{kDp2, kOnGpu}, To{kEp4, kOnGpu}, To{kEp2, kOnCpu},
                         To{kDp2, kOnCpu}}) {
      const std::string part = text("{}-{}-{}", from.name, to.ranks.name, to.where[0]);
      stop_after(whole, part, 3);
      train_at(part, to.ranks, to.where + each + still);
      const auto before = digests(checkpoint_path(at(whole), 3)),
                 after = digests(checkpoint_path(at(part), 4));
      for (const auto& [name, digest] : before) {
        if (name.starts_with("weight/") && !name.ends_with("router.bias")) {
          EXPECT_EQ(digest, after.at(name)) << name << " in " << part;
        }
      }
    }
  }
  for (const To& from : {To{kEp2, kOnCpu}, To{kDp2, kOnGpu}}) {
    const std::string whole = text("to-ep2-from-{}-{}", from.ranks.name, from.where[0]);
    train_at(whole, from.ranks, from.where + each);
    stop_after(whole, whole + "-rest", 3);
    train_at(whole + "-rest", kEp2, kOnGpu + each);
    expect_near(at(whole + "-rest"), at(whole), 1e-4);
  }
}

// What stands between the replays of a graph, as the look at all weights before they are saved, must
// not change where on the GPU its branches wait.
TEST_F(ExpertParallelGpu, StepsGoOnBehindManyCheckpoints) {
  for (int n = 0; n < 4; ++n) {
    for (const Ranks& r : {kDp2, kEp2, kEp2Tp2Dp2}) {
      train_at(text("{}-{}", r.name, n), r,
               kOnGpu + Arguments{"--checkpoint.interval=3", "--checkpoint.keep_last=2",
                                  "--train.steps=12", "--guard.comm_timeout_s=5"});
    }
  }
}

TEST_F(ExpertParallelGpu, ResumeIsBitwise) { expect_resume_is_bitwise(kEp2Dp2); }

TEST_F(ExpertParallelGpu, TheGuardStopsABadRun) { expect_bad_run_halts(kEp2); }

TEST_F(ExpertParallelGpu, WhatIsNotThereIsRefused) {
  expect_refused(kEp2, kOnGpu + Arguments{"--ep.overlap=micro_batch", "--train.micro_batch=3"},
                 kExitUsage,
                 "ep.overlap = \"micro_batch\": micro-batches take turns on CPU ranks alone");
  expect_refused(kEp2, kOnGpu + Arguments{"--parallel.ep=1", "--parallel.egtp=2"}, kExitUsage,
                 "parallel.egtp = 2: this version");
}

TEST_F(ExpertParallelGpu, ALatePeerIsNamed) {
  const std::string error = error_of_late_data(at(""), 2);
  EXPECT_NE(error.find("ep "), std::string::npos) << error;
  EXPECT_NE(error.find("waited 2.0 s for rank "), std::string::npos) << error;
}

}  // namespace
}  // namespace moiety::app
