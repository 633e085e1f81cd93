#include "moiety/train/layout.h"

#include <gtest/gtest.h>

#include "moiety/train/config_check.h"
#include "tests/support/error_of.h"

namespace moiety::train {
namespace {

TEST(Layout, IsDescribedByTheDegreesThatAreNotOne) {
  EXPECT_EQ(describe_layout({}), "1 rank");
  EXPECT_EQ(describe_layout({.dp = 2, .ep = 2}), "2 ranks (dp 2, ep 2)");
  EXPECT_EQ(describe_layout({.tp = 2, .gtp = 3, .dp = 2, .ep = 1, .egtp = 4, .edp = 3}),
            "12 ranks (dp 2, gtp 3, tp 2, edp 3, egtp 4)");
}

TEST(Layout, DegreesThatAreNotGivenAreWhatRemains) {
  TrainConfig c;
  c.run.ranks = 8;
  c.parallel = {.tp = 2, .gtp = 2, .ep = 4};
  const Grid grid = check_layout(c);
  EXPECT_EQ(grid.dp, 2);
  EXPECT_EQ(grid.edp, 2);
  EXPECT_EQ(data_ranks(grid), 4);
  EXPECT_EQ(data_rank(grid, 5), 2);
  c.train.global_batch = 24;
  c.train.micro_batch = 2;
  EXPECT_EQ(micro_steps(c, grid), 3);
  EXPECT_EQ(rank_layout(grid).ranks, 8);
}

TEST(ConfigCheck, LengthOfTheRun) {
  TrainConfig c;
  EXPECT_EQ(total_steps(c), 1000);
  c.train.steps = 7;
  EXPECT_EQ(total_steps(c), 7);
  c.train.steps = 0;
  c.train.tokens = 8 * 1024 * 3 + 1;
  EXPECT_EQ(total_steps(c), 4);
}

TEST(ConfigCheck, ARunHasADirectory) {
  const TrainConfig c;
  EXPECT_EQ(error_of([&] { check_training(c, check_layout(c)); }, ErrorKind::kUsage),
            "run.dir = \"\": a run needs a directory");
}

TEST(ConfigCheck, StepsAreCapturedOnAGpuAlone) {
  TrainConfig c;
  const Device gpu{DeviceType::kCuda, 0};
  check_graph(c, {});
  c.train.cuda_graph = true;
  EXPECT_EQ(error_of([&] { check_graph(c, {}); }, ErrorKind::kUsage),
            "train.cuda_graph = \"true\", but the run is on the CPU");
  check_graph(c, gpu);
  c.guard.nan = optim::NanGuard::kTensor;
  EXPECT_EQ(error_of([&] { check_graph(c, gpu); }, ErrorKind::kUsage),
            "train.cuda_graph = \"true\": guard.nan = \"tensor\" looks at single operations");
}

}  // namespace
}  // namespace moiety::train
