// Training of ranks that are threads and share a GPU, through the program: against one rank, against
// CPU ranks, captured against eager, and across layouts.
#include "tests/apps_gpu/late_data.h"
#include "tests/apps_gpu/ranks_on_gpu.h"
#include "tests/support/loaded_kernels.h"

namespace moiety::app {
namespace {

class SeveralRanksGpu : public RanksOnGpu {};

// The first test, since a kernel is loaded once in a process. A run's first step, in which every
// operation that waits runs alone, and the capture of the second load all that steps launch.
TEST_F(SeveralRanksGpu, AStepLoadsNoKernel) {
  train_at("opens-the-gpu", kOne, kOnGpu + Arguments{"--train.steps=1"});
  const testing::Kernels first = testing::find_kernels(0);
  if (int64_t(first.loaded.size()) == first.all) GTEST_SKIP() << "CUDA loads kernels at its start";
  const Ranks ep2{"ep2", 2, 1, 2};
  for (const Ranks& r : {kDp2, kTp2, kTp2Dp2, ep2}) {
    for (const Arguments& how : {kEager, kCaptured}) {
      const std::string name = text("{}-{}", r.name, how == kEager ? "eager" : "captured");
      const auto kernels_of = [&](int steps) {
        train_at(text("{}-{}", name, steps), r,
                 kOnGpu + how +
                     Arguments{"--checkpoint.interval=0", "--precision.recipe=bf16",
                               text("--train.steps={}", steps)});
        return testing::find_kernels(0).loaded;
      };
      const auto settled = kernels_of(how == kEager ? 1 : 2);
      for (const std::string& kernel : kernels_of(12)) {
        EXPECT_TRUE(settled.contains(kernel)) << name << " loads " << kernel;
      }
    }
  }
}

TEST_F(SeveralRanksGpu, TrainAsOne) {
  const Arguments gentle = kOnGpu + kLonger + kGentle;
  train_at("one", kOne, gentle);
  for (const Ranks& r : {kDp2, kDp3, kTp2, kTp2Dp2, kDp4}) {
    train_at(r.name, r, gentle);
    expect_near(at(r.name), at("one"), 1e-4);
  }
}

TEST_F(SeveralRanksGpu, TrainAsCpuRanks) {
  for (const Ranks& r : {kDp3, kTp2}) {
    train_at(text("gpu-{}", r.name), r, kOnGpu + kLonger + kGentle);
    train_at(text("cpu-{}", r.name), r, kOnCpu + kLonger + kGentle);
    expect_near(at(text("gpu-{}", r.name)), at(text("cpu-{}", r.name)), 1e-4);
  }
}

TEST_F(SeveralRanksGpu, CapturedStepsAreEagerOnesAndTwoRunsAreEqual) {
  for (const Ranks& r : {kDp2, kTp2, kTp2Dp2}) expect_captured_is_eager(r);
}

TEST_F(SeveralRanksGpu, BlocksOfSumsChangeNothing) {
  for (const int blocks : {1, 64}) {
    train_at(text("blocks-{}", blocks), kTp2Dp2,
             kOnGpu + Arguments{text("--comm.sum_sms={}", blocks), "--checkpoint.interval=0"});
  }
  expect_equal("blocks-1", "blocks-64");
}

TEST_F(SeveralRanksGpu, AStepNeitherAllocatesNorWaits) {
  for (const Ranks& r : {kDp2, kTp2}) {
    for (const Arguments& how : {kEager, kCaptured}) {
      const std::string name = text("{}-{}", r.name, how == kEager ? "eager" : "captured");
      train_at(name, r, kOnGpu + how + Arguments{"--train.steps=8", "--checkpoint.interval=0"});
      for (const auto& [step, record] : steps(at(name))) {
        if (step == 1) continue;  // finds out how much memory a step takes
        EXPECT_EQ(record["host_waits"], 0) << name << " " << step;
        EXPECT_EQ(record["allocations"], 0) << name << " " << step;
      }
    }
  }
}

// Gradients that travel in bf16, and each kind of recipe; choices of experts part in the end.
TEST_F(SeveralRanksGpu, RecipesAreNearOneRank) {
  for (const char* recipe : {"bf16", "fp8_block", "mxfp8", "nvfp4"}) {
    const Arguments more{text("--precision.recipe={}", recipe),
                         "--model.d_model=256",
                         "--model.d_ffn_dense=256",
                         "--moe.shared_d_ffn=256",
                         "--moe.d_ffn=128",
                         "--train.steps=8",
                         "--optim.lr=0.001",
                         "--precision.grad_reduce=bf16",
                         "--checkpoint.interval=0"};
    train_at(text("one-{}", recipe), kOne, kOnGpu + more);
    for (const Ranks& r : {kDp2, kTp2}) {
      const std::string name = text("{}-{}", r.name, recipe);
      train_at(name, r, kOnGpu + more);
      expect_losses_near(at(name), at(text("one-{}", recipe)), 0.02);
    }
  }
}

TEST_F(SeveralRanksGpu, TheRecipeChangesOnTheWay) {
  const Arguments more = kOnGpu + Arguments{"--precision.recipe=mxfp8", "--precision.switch_step=4",
                                            "--model.d_model=128",      "--moe.d_ffn=128",
                                            "--model.d_ffn_dense=128",  "--moe.shared_d_ffn=128",
                                            "--train.steps=8",          "--checkpoint.interval=0"};
  train_at("captured", kDp2, more);
  train_at("eager", kDp2, more + kEager);
  expect_equal("captured", "eager");
}

// The loader compares the digest of every tensor and slot with the manifest's, so a run that goes
// on has weights and moments bit for bit. At a rate of 0 weights stay what they were.
TEST_F(SeveralRanksGpu, CheckpointsMoveBetweenLayoutsAndDevices) {
  const Arguments each{"--checkpoint.interval=3", "--checkpoint.keep_last=10"};
  const Arguments still{"--optim.lr=0", "--optim.min_lr=0", "--optim.weight_decay=0",
                        "--train.steps=4"};
  struct To {
    Ranks ranks;
    Arguments where;
  };
  train_at("from-cpu", kDp3, kOnCpu + each);
  for (const Ranks& from : {kDp2, kTp2Dp2}) {
    const std::string whole = text("from-{}", from.name);
    train_at(whole, from, kOnGpu + each);
    for (const To& to : {To{kOne, kOnGpu}, To{kTp2, kOnGpu}, To{kDp3, kOnGpu}, To{kDp2, kOnCpu}}) {
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
  stop_after("from-cpu", "cpu-to-gpu", 3);
  train_at("cpu-to-gpu", kTp2, kOnGpu + each);
  expect_near(at("cpu-to-gpu"), at("from-cpu"), 1e-4);
}

TEST_F(SeveralRanksGpu, ResumeIsBitwise) { expect_resume_is_bitwise(kTp2Dp2); }

// Capacity that grows repeats steps; evaluation uses the model between steps.
TEST_F(SeveralRanksGpu, StepsAreRepeatedAndEvaluated) {
  const std::string tokens = write_tokens(dir / "a.tok", {ramp(900), ramp(300, 7)});
  const Arguments more{"--router.aux=none",
                       "--data.synthetic=none",
                       "--data.train=[\"" + tokens + "\"]",
                       "--data.valid=[\"" + tokens + "\"]",
                       "--eval.every=3",
                       "--eval.samples=12",
                       "--train.steps=9",
                       "--checkpoint.interval=0"};
  const auto losses = [&](const std::string& name) {
    std::vector<double> out;
    for (const auto& event : events(at(name), "eval")) out.push_back(event["loss"].get<double>());
    return out;
  };
  train_at("one", kOne, kOnGpu + more);
  const std::vector<double> one = losses("one");
  for (const Ranks& r : {kDp2, kTp2, kTp2Dp2}) {
    const std::string name = r.name, eager = name + "-eager";
    train_at(name, r, kOnGpu + more + kCaptured);
    expect_near(at(name), at("one"), 1e-4);
    const std::vector<double> many = losses(name);
    ASSERT_EQ(one.size(), many.size());
    for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(many[i], one[i], 1e-4 * one[i]);
    // Between replays of a step all weights are there.
    train_at(eager, r, kOnGpu + more + kEager);
    EXPECT_EQ(losses(eager), many);
  }
}

TEST_F(SeveralRanksGpu, TheGuardStopsABadRun) { expect_bad_run_halts(kDp2); }

TEST_F(SeveralRanksGpu, WhatIsNotThereIsRefused) {
  expect_refused(kDp2, {"--run.device=cuda", "--parallel.gtp=2"}, kExitUsage,
                 "parallel.gtp = 2: this version");
  if (gpu_status().count > 1) return;
  expect_refused(
      kDp2, {"--run.device=cuda"}, kExitDevice,
      "run.ranks = 2 and run.device = \"cuda\": this host has 1 GPU; take at most 1 rank here, "
      "let ranks share GPUs (--run.share_gpus), or take CPUs (--run.device=cpu)");
}

// The data of one rank come after the deadline of the others. Where steps are enqueued one at a time
// it is the GPU of another rank that waits for it. All end with one sentence, and the GPU can be used
// afterwards.
TEST_F(SeveralRanksGpu, ALatePeerIsNamed) {
  const std::string error = error_of_late_data(at(""), 1);
  EXPECT_NE(error.find("waited 2.0 s for rank "), std::string::npos) << error;
  EXPECT_NE(error.find("comm \""), std::string::npos) << error;
}

}  // namespace
}  // namespace moiety::app
