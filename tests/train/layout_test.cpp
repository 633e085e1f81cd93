#include "moiety/train/layout.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace moiety::train
