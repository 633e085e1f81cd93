#include "moiety/train/step/replay.h"

#include <vector>

#include <gtest/gtest.h>

namespace moiety::train {
namespace {

TEST(Replay, TheEarliestTensorOfTheLowestRankIsNamed) {
  const std::vector<RankReplay> ranks{{.order = 9, .finding = "late"},
                                      {.order = 4, .finding = "early"},
                                      {.order = 4, .finding = "also early"}};
  EXPECT_EQ(replay_verdict(ranks, "x"), "rank 1: early");
  EXPECT_EQ(parse_rank_replay(to_json(ranks[1])).finding, "early");
}

TEST(Replay, AFaultThatDoesNotComeAgainAccusesTheHardware) {
  std::vector<RankReplay> ranks{{.first = 0x1a, .again = 0x1a},
                                {.first = 0x2b, .again = 0xffffffff}};
  EXPECT_EQ(replay_verdict(ranks, ""),
            "not reproduced: suspect hardware; checksums of the step and of its replay: rank 0 "
            "0000001a 0000001a, rank 1 0000002b ffffffff");
  EXPECT_EQ(replay_verdict(ranks, "head.weight"),
            "the gradient of head.weight is finite on every rank and overflows in their sum");
  ranks[1].again = ranks[1].first;
  EXPECT_EQ(replay_verdict(ranks, ""), "the replay gives the same bits, all of them finite");
  ranks[0].before = "layer 0: norm";
  EXPECT_NE(replay_verdict(ranks, "").find("; the step had rank 0: layer 0: norm"),
            std::string::npos);
}

}  // namespace
}  // namespace moiety::train
