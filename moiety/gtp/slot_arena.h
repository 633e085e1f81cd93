// The memory of slots: blocks that stay where they are for the life of an executor, and the slots
// of every plan in them (docs/spec/gtp.md#executor). Plans of other steps use the same memory, and
// so does a step without a plan.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "moiety/base/tensor_view.h"
#include "moiety/gtp/plan.h"

namespace moiety::gtp {

// A space of memory. Gathers and scratch are for the rank alone; the send slots of a group are read
// by its peers, who have to find them at the same offsets.
struct Space {
  bool send = false;
  int group = 0;  // for send slots
  static Space of(const SlotSpec& slot);
  friend auto operator<=>(const Space&, const Space&) = default;
};

class SlotArena {
 public:
  // Memory, uint8 aligned to 256 bytes, and its owner. Calls of the allocator depend only on the
  // plans and sizes passed in: if these are equal on all ranks it may be collective.
  struct Block {
    TensorView memory;
    std::shared_ptr<void> owner;
  };
  using Allocate = std::function<Block(Space space, int64_t bytes)>;

  explicit SlotArena(Allocate allocate) : allocate_(std::move(allocate)) {}

  struct Slot {
    TensorView memory;   // uint8 [bytes]
    int32_t block = 0;   // block of its space
    int64_t offset = 0;  // in the block
  };
  // The slots of a plan, by number. They do not overlap and never move. Slots of earlier plans are
  // used again if they are large enough; blocks are added for the rest.
  std::vector<Slot> place(std::span<const SlotSpec> slots);

  // A piece of memory for the calls of a step without a plan, in memory that plans use too. It does
  // not overlap `apart`, other pieces of the same space. Grows if no gap is large enough.
  Slot demand(Space space, int64_t bytes, std::span<const Slot> apart = {});

  int64_t bytes() const;  // bytes of all blocks

 private:
  struct Memory {
    std::vector<Block> blocks;
    std::vector<int64_t> used;  // bytes of a block that slots take
    std::vector<Slot> slots;    // slots of all plans, by bytes

    Slot carve(size_t block, int64_t offset, int64_t bytes) const;
    // The number of the smallest slot that is large enough and not in use.
    std::optional<size_t> find(int64_t bytes, const std::vector<bool>& in_use) const;
  };

  // Adds slots of these sizes, in the rest of the blocks and then in a new one.
  std::vector<Slot> add_slots(Space space, std::span<const int64_t> bytes);
  size_t add_block(Space space, int64_t bytes);

  Allocate allocate_;
  std::map<Space, Memory> spaces_;
};

}  // namespace moiety::gtp
