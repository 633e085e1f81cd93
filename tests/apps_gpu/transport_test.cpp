// What carries the operations of ranks that have a GPU each: memory that they map, or NCCL.
#include "moiety/comm/gpu_transport.h"
#include "tests/apps_gpu/ranks_on_gpu.h"

namespace moiety::app {
namespace {

const Arguments kThreads{"--run.device=cuda", "--run.launch=threads"};
const Arguments kMapped = kThreads + Arguments{"--comm.transport=mapped"};
const Arguments kNccl = kThreads + Arguments{"--comm.transport=nccl"};

constexpr Ranks kEp2{"ep2", 2, 1, 2};

class Transport : public RanksOnGpu {
 protected:
  void SetUp() override {
    RanksOnGpu::SetUp();
    if (IsSkipped()) return;
    if (!comm::nccl_status().available) GTEST_SKIP() << comm::nccl_status().text;
    if (gpu_status().count < 2) GTEST_SKIP() << "needs two GPUs";
  }
};

TEST_F(Transport, NcclGivesTheBitsOfMappedMemory) {
  for (const Ranks& r : {kDp2, kTp2, kEp2}) {
    for (const Arguments& recipe :
         {Arguments{"--precision.recipe=fp32"}, Arguments{"--precision.recipe=bf16"}}) {
      const auto named = [&](const char* what) {
        return text("{}-{}-{}", what, r.name, recipe[0].substr(recipe[0].find('=') + 1));
      };
      const Arguments steps{"--train.steps=20"};
      train_at(named("mapped"), r, kMapped + kCaptured + recipe + steps);
      train_at(named("nccl"), r, kNccl + kCaptured + recipe + steps);
      train_at(named("eager"), r, kNccl + kEager + recipe + steps);
      expect_equal(named("mapped"), named("nccl"));
      expect_equal(named("mapped"), named("eager"));
      const auto all = digests(checkpoint_path(at(named("mapped")), 20));
      EXPECT_EQ(all, digests(checkpoint_path(at(named("nccl")), 20)));
    }
  }
}

TEST_F(Transport, NcclBringsTheRowsOfSingleChoices) {
  const Arguments token{"--precision.recipe=bf16", "--moe.combine=token", "--train.steps=12"};
  train_at("token-mapped", kEp2, kMapped + kCaptured + token);
  train_at("token-nccl", kEp2, kNccl + kCaptured + token);
  expect_equal("token-mapped", "token-nccl");
}

// A run goes on with the other one.
TEST_F(Transport, IsFreeToChangeAtAResume) {
  const Arguments each{"--train.steps=12", "--checkpoint.interval=6", "--checkpoint.keep_last=10"};
  train_at("whole", kDp2, kMapped + each);
  stop_after("whole", "changed", 6);
  train_at("changed", kDp2, kNccl + each);
  expect_equal("changed", "whole");
}

TEST_F(RanksOnGpu, NcclRefusesRanksThatShareAGpu) {
  if (gpu_status().count > 1) GTEST_SKIP() << "each rank has a GPU";
  const ProgramResult result = run(model("shared", kDp2) + kNccl + Arguments{"--run.share_gpus"});
  EXPECT_EQ(result.code, kExitUsage);
  EXPECT_NE(
      result.err.find("comm.transport = \"nccl\": ranks 0 and 1 share cuda:0, which NCCL refuses"),
      std::string::npos)
      << result.err;
}

}  // namespace
}  // namespace moiety::app
