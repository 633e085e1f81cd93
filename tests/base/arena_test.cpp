#include "moiety/base/arena.h"

#include <vector>

#include <gtest/gtest.h>

namespace moiety {
namespace {

TEST(Arena, SettlesToStableAddresses) {
  Arena arena("test", 256);
  const auto step = [&] {
    std::vector<void*> addresses;
    ArenaScope scope(arena);
    for (int64_t bytes : {100, 1000, 64}) {
      ArenaScope inner(arena);
      addresses.push_back(arena.allocate(bytes));
      addresses.push_back(arena.tensor(DType::kBFloat16, {7, 9}).raw());
    }
    addresses.push_back(arena.allocate(0));
    return addresses;
  };
  step();
  arena.settle();
  const auto first = step();
  arena.settle();
  EXPECT_EQ(first, step());
  EXPECT_EQ(arena.in_use(), 0);
  EXPECT_EQ(arena.reserved(), arena.peak());
  EXPECT_EQ(arena.peak(), 1024 + 128);
}

}  // namespace
}  // namespace moiety
