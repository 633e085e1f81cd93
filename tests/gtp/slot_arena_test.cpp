// Memory of slots: apart from each other, never moved, shared by plans.
#include "moiety/gtp/slot_arena.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "tests/gtp/traces.h"

namespace moiety::gtp {
namespace {

constexpr Space kLocal{};

struct Counted {
  int calls = 0;
  std::vector<std::pair<Space, int64_t>> blocks;
  SlotArena arena{[this](Space space, int64_t bytes) {
    ++calls;
    blocks.emplace_back(space, bytes);
    auto buffer = std::make_shared<Buffer>(bytes, "arena", 256);
    return SlotArena::Block{buffer->view(DType::kUInt8, {bytes}), buffer};
  }};
};

SlotSpec slot_of(int64_t bytes, SlotUse use = SlotUse::kGather, int group = 0) {
  return {use, group, false, false, bytes};
}
const std::byte* begin_of(const SlotArena::Slot& s) {
  return static_cast<const std::byte*>(s.memory.raw());
}

void expect_apart(std::vector<SlotArena::Slot> slots) {
  std::erase_if(slots, [](const SlotArena::Slot& s) { return s.memory.bytes() == 0; });
  std::sort(slots.begin(), slots.end(),
            [](const auto& a, const auto& b) { return std::less<>()(begin_of(a), begin_of(b)); });
  for (size_t i = 0; i < slots.size(); ++i) {
    ASSERT_EQ(reinterpret_cast<uintptr_t>(begin_of(slots[i])) % 256, 0u);
    if (i == 0) continue;
    ASSERT_LE(begin_of(slots[i - 1]) + slots[i - 1].memory.bytes(), begin_of(slots[i]));
  }
}

TEST(SlotArena, AFirstPlanIsOneBlockOfEachSpace) {
  Counted c;
  const std::vector<SlotSpec> specs{slot_of(1000), slot_of(1000), slot_of(300, SlotUse::kSend, 1),
                                    slot_of(64, SlotUse::kScratch)};
  const auto slots = c.arena.place(specs);
  ASSERT_EQ(slots.size(), 4u);
  EXPECT_EQ(c.calls, 2);
  EXPECT_EQ(c.arena.bytes(), 1024 + 1024 + 256 + 512);
  EXPECT_EQ(c.blocks[1], (std::pair{Space{true, 1}, int64_t{512}}));
  for (size_t i = 0; i < specs.size(); ++i) EXPECT_EQ(slots[i].memory.bytes(), specs[i].bytes);
  expect_apart(slots);
}

TEST(SlotArena, ThePlanAgainHasTheSameSlots) {
  Counted c;
  const std::vector<SlotSpec> specs{slot_of(500), slot_of(1000), slot_of(1000)};
  const auto first = c.arena.place(specs), again = c.arena.place(specs);
  EXPECT_EQ(c.calls, 1);
  for (size_t i = 0; i < specs.size(); ++i) EXPECT_EQ(begin_of(first[i]), begin_of(again[i]));
}

TEST(SlotArena, AnotherPlanUsesWhatFitsAndAddsABlock) {
  Counted c;
  const std::vector<SlotSpec> train{slot_of(1000), slot_of(2000)},
      eval{slot_of(900), slot_of(4000)};
  const auto a = c.arena.place(train), b = c.arena.place(eval);
  EXPECT_EQ(c.calls, 2);
  EXPECT_EQ(begin_of(a[0]), begin_of(b[0]));
  EXPECT_EQ(b[1].block, 1);
  EXPECT_EQ(c.arena.bytes(), 1024 + 2048 + 4096);
  EXPECT_EQ(begin_of(c.arena.place(train)[1]), begin_of(a[1]));
}

// A step without a plan needs no memory beside that of the plans, and leaves room for them.
TEST(SlotArena, DemandAndPlansShareMemory) {
  Counted c;
  const std::vector<SlotSpec> specs{slot_of(1000), slot_of(1000), slot_of(1000)};
  const auto placed = c.arena.place(specs);
  EXPECT_EQ(c.calls, 1);
  std::vector<SlotArena::Slot> pieces;
  for (const int64_t bytes : {1500, 0, 400}) {
    pieces.push_back(c.arena.demand(kLocal, bytes, pieces));
    EXPECT_EQ(pieces.back().memory.bytes(), bytes);
  }
  expect_apart(pieces);
  EXPECT_EQ(begin_of(pieces[0]), begin_of(c.arena.demand(kLocal, 3072)));
  // The first gap that is large enough, between what is in use.
  const std::vector<SlotArena::Slot> ends{placed[2], placed[0]};
  EXPECT_EQ(begin_of(c.arena.demand(kLocal, 1024, ends)), begin_of(placed[1]));
  EXPECT_EQ(c.calls, 1);
  EXPECT_EQ(c.arena.demand(kLocal, 1025, ends).block, 1);
  EXPECT_EQ(c.calls, 2);
  EXPECT_EQ(c.arena.bytes(), 3072 + 1280);
}

TEST(SlotArena, RefusesBlocksThatAreNotWhatWasAskedFor) {
  SlotArena arena([](Space, int64_t bytes) {
    auto buffer = std::make_shared<Buffer>(bytes + 512, "arena", 256);
    return SlotArena::Block{buffer->view(DType::kUInt8, {bytes + 512}).slice(0, 16, bytes + 16),
                            buffer};
  });
  const std::vector<SlotSpec> specs{slot_of(512)};
  EXPECT_THROW(arena.place(specs), Error);
}

// For the plans of random steps, slots do not overlap, lie in their blocks and stay where they
// were; the memory is at most that of all plans, and at least that of the largest.
TEST(SlotArena, RandomPlans) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Counted c;
    std::vector<std::vector<SlotSpec>> plans;
    std::vector<std::vector<SlotArena::Slot>> placed;
    int64_t sum = 0, largest = 0;
    for (uint64_t k = 0; k < 4; ++k) {
      const TraceCase step = random_case(seed * 4 + k);
      plans.push_back(plan(step.trace, step.bundles, step.policy).slots);
      int64_t bytes = 0;
      for (SlotSpec& slot : plans.back()) {
        slot.bytes /= 1024;  // KiB for MiB
        bytes += std::max<int64_t>(1, (slot.bytes + 255) / 256) * 256;
      }
      placed.push_back(c.arena.place(plans.back()));
      sum += bytes;
      largest = std::max(largest, bytes);
      expect_apart(placed.back());
    }
    EXPECT_GE(c.arena.bytes(), largest);
    EXPECT_LE(c.arena.bytes(), sum);
    const int64_t before = c.arena.bytes();
    for (size_t k = 0; k < plans.size(); ++k) {
      const auto again = c.arena.place(plans[k]);
      expect_apart(again);
      for (size_t i = 0; i < again.size(); ++i) {
        ASSERT_EQ(again[i].memory.bytes(), plans[k][i].bytes);
      }
    }
    EXPECT_EQ(c.arena.bytes(), before);
  }
}

}  // namespace
}  // namespace moiety::gtp
