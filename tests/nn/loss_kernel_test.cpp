// How blocks of a GPU share a row of logits is decided without one, so it is tested without one.
#include "moiety/nn/loss_kernel.h"

#include <gtest/gtest.h>

namespace moiety::nn {
namespace {

constexpr int64_t kShared = 227 << 10;  // of an H100's block

TEST(LossShape, AClusterKeepsTheWholeRow) {
  int log = 0;
  for (int64_t vocabulary = 1; vocabulary <= 463'872; vocabulary += vocabulary / 50 + 1) {
    const LossShape shape = choose_loss(vocabulary, kShared);
    ASSERT_TRUE(shape.kept) << vocabulary;
    EXPECT_GE(shape.part() << shape.log, vocabulary);
    EXPECT_LT(shape.part() << shape.log, vocabulary + 1024);
    EXPECT_LE(shape.bytes(), kShared);
    EXPECT_GE(shape.log, log) << vocabulary;
    log = shape.log;
  }
}

TEST(LossShape, ThreeBlocksOfAMultiprocessorIfAClusterAllowsIt) {
  const auto log = [](int64_t vocabulary) { return choose_loss(vocabulary, kShared).log; };
  EXPECT_EQ(log(18'432), 0);
  EXPECT_EQ(log(18'433), 1);
  EXPECT_EQ(log(32'000), 1);
  EXPECT_EQ(log(50'304), 2);
  EXPECT_EQ(log(128'256), 3);
  EXPECT_EQ(log(151'936), 3);
  EXPECT_LE(3 * (choose_loss(151'936, kShared).bytes() + 1024), 228 << 10);
  EXPECT_EQ(log(262'144), 3);  // no cluster lets three fit
}

TEST(LossShape, LongerRowsAreNotKept) {
  EXPECT_TRUE(choose_loss(463'872, kShared).kept);
  EXPECT_FALSE(choose_loss(463'873, kShared).kept);
  EXPECT_FALSE(choose_loss(463'872, 99 << 10).kept);
}

}  // namespace
}  // namespace moiety::nn
