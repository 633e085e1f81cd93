#include "moiety/base/arena.h"

#include <vector>

#include <gtest/gtest.h>

namespace moiety {
namespace {

TEST(Arena, LendsMemoryToThoseWhoAskAsLongAsThereIsRoom) {
  Arena arena("test");
  std::vector<std::byte> memory(256);
  const auto is_lent = [&](const TensorView& x) {
    return x.raw() >= memory.data() && x.raw() < memory.data() + memory.size();
  };
  EXPECT_FALSE(is_lent(arena.lent_tensor(DType::kUInt8, {10})));
  const Arena::Mark before = arena.mark();
  arena.lend(memory);
  const TensorView first = arena.lent_tensor(DType::kUInt8, {100});
  EXPECT_EQ(first.raw(), memory.data());
  EXPECT_FALSE(is_lent(arena.tensor(DType::kUInt8, {10})));
  const int64_t in_use = arena.in_use();
  {
    const ArenaScope scope(arena);
    EXPECT_EQ(arena.lent_tensor(DType::kUInt8, {65}).raw(), memory.data() + 128);
    EXPECT_FALSE(is_lent(arena.lent_tensor(DType::kUInt8, {1})));  // none is left
  }
  EXPECT_EQ(arena.in_use(), in_use);
  EXPECT_EQ(arena.lent_tensor(DType::kUInt8, {1}).raw(), memory.data() + 128);
  EXPECT_THROW(arena.lend({}), Error);
  arena.release(before);
  arena.lend({});
  EXPECT_FALSE(is_lent(arena.lent_tensor(DType::kUInt8, {1})));
}

TEST(Arena, StaysInTheMemoryThatItIsGiven) {
  const Tensor memory(DType::kUInt8, {256});
  Arena arena("test", memory.view());
  EXPECT_EQ(arena.allocate(100), memory.view().raw());
  {
    const ArenaScope scope(arena);
    EXPECT_EQ(arena.tensor(DType::kFloat32, {32}).raw(), memory.data<uint8_t>() + 128);
    EXPECT_THROW(arena.allocate(1), Error);
  }
  EXPECT_EQ(arena.allocate(1), static_cast<std::byte*>(memory.view().raw()) + 128);
  EXPECT_EQ(arena.peak(), 256);
  EXPECT_EQ(arena.reserved(), 0);
  EXPECT_THROW(Arena("test", memory.view().slice(0, 1, 65)), Error);
}

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
