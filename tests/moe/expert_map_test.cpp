#include "moiety/moe/expert_map.h"

#include <gtest/gtest.h>

#include "tests/support/error_of.h"

namespace moiety::moe {
namespace {

// Owner, local index and the lists of ranks say the same.
void expect_consistent(const ExpertMap& map) {
  int seen = 0, largest = 0;
  for (int r = 0; r < map.ranks(); ++r) {
    const auto experts = map.experts_of(r);
    ASSERT_EQ(std::ssize(experts), map.local_count(r));
    for (int i = 0; i < map.local_count(r); ++i, ++seen) {
      EXPECT_EQ(map.owner(experts[i]), r);
      EXPECT_EQ(map.local_index(experts[i]), i);
      EXPECT_TRUE(i == 0 || experts[i - 1] < experts[i]);
    }
    largest = std::max(largest, map.local_count(r));
  }
  EXPECT_EQ(seen, map.experts());
  EXPECT_EQ(map.local_max(), largest);
}

TEST(ExpertMap, BlocksOfEqualSizeAsFarAsTheyGo) {
  for (const int experts : {1, 2, 5, 8, 64, 257}) {
    for (const int ranks : {1, 2, 3, 8, 9}) {
      const ExpertMap map(experts, ranks);
      expect_consistent(map);
      for (int e = 1; e < experts; ++e) EXPECT_LE(map.owner(e - 1), map.owner(e));
      for (int r = 0; r < ranks; ++r) EXPECT_LE(map.local_max() - map.local_count(r), 1);
    }
  }
}

TEST(ExpertMap, AnyOwnersAndRanksWithoutExperts) {
  const ExpertMap map({2, 0, 2, 2, 0}, 4);
  expect_consistent(map);
  EXPECT_EQ(map.local_count(1), 0);
  EXPECT_EQ(map.local_count(3), 0);
  EXPECT_EQ(map.local_max(), 3);
  EXPECT_EQ(map.local_index(3), 2);
}

TEST(ExpertMap, RefusesWhatIsNoMap) {
  EXPECT_EQ(error_of([] {
              ExpertMap({0, 2}, 2);
            }),
            "expert map: owner 2 of expert 1 is outside [0, 2)");
  EXPECT_EQ(error_of([] {
              ExpertMap({0, -1}, 2);
            }),
            "expert map: owner -1 of expert 1 is outside [0, 2)");
  EXPECT_EQ(error_of([] { ExpertMap(4, 0); }), "expert map: 0 ranks");
  EXPECT_EQ(error_of([] { ExpertMap(0, 2); }), "expert map: 0 experts, at most 4096");
  EXPECT_EQ(error_of([] { ExpertMap(4097, 2); }), "expert map: 4097 experts, at most 4096");
}

}  // namespace
}  // namespace moiety::moe
