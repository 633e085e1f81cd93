#include "moiety/gtp/slot_arena.h"

#include <algorithm>
#include <numeric>

#include "moiety/base/integer.h"

namespace moiety::gtp {
namespace {

constexpr int64_t kAlignment = 256;

// The bytes that a slot takes; slots of no bytes have an address of their own too.
int64_t room(int64_t bytes) {
  return std::max<int64_t>(1, ceil_div(bytes, kAlignment)) * kAlignment;
}

}  // namespace

Space Space::of(const SlotSpec& slot) {
  const bool send = slot.use == SlotUse::kSend;
  return {send, send ? slot.group : 0};
}

SlotArena::Slot SlotArena::Memory::carve(size_t block, int64_t offset, int64_t bytes) const {
  return {blocks[block].memory.slice(0, offset, offset + bytes), static_cast<int32_t>(block),
          offset};
}

std::optional<size_t> SlotArena::Memory::find(int64_t bytes,
                                              const std::vector<bool>& in_use) const {
  const auto smaller = [&](const Slot& s) { return s.memory.bytes() < bytes; };
  size_t k = std::partition_point(slots.begin(), slots.end(), smaller) - slots.begin();
  while (k < slots.size() && in_use[k]) ++k;
  return k < slots.size() ? std::optional(k) : std::nullopt;
}

size_t SlotArena::add_block(Space space, int64_t bytes) {
  Block block = allocate_(space, bytes);
  check_tensor("gtp arena", "block", block.memory, DType::kUInt8, {bytes});
  MOIETY_CHECK(reinterpret_cast<uintptr_t>(block.memory.raw()) % kAlignment == 0,
               "gtp arena: block {} is not aligned to {} bytes", block.memory.raw(), kAlignment);
  Memory& memory = spaces_[space];
  memory.blocks.push_back(std::move(block));
  memory.used.push_back(0);
  return memory.blocks.size() - 1;
}

std::vector<SlotArena::Slot> SlotArena::add_slots(Space space, std::span<const int64_t> bytes) {
  Memory& memory = spaces_[space];
  // Everything is decided before anything is changed, since there may be no memory for a block.
  std::vector<int64_t> used = memory.used;
  std::vector<std::pair<size_t, int64_t>> places;  // block and offset
  const size_t added = memory.blocks.size();
  int64_t needed = 0;
  for (const int64_t b : bytes) {
    size_t block = 0;
    while (block < added && used[block] + room(b) > memory.blocks[block].memory.bytes()) ++block;
    int64_t& end = block < added ? used[block] : needed;
    places.emplace_back(block, end);
    end += room(b);
  }
  if (needed > 0) {
    add_block(space, needed);
    used.push_back(needed);
  }
  memory.used = used;
  std::vector<Slot> out;
  for (size_t i = 0; i < bytes.size(); ++i) {
    out.push_back(memory.carve(places[i].first, places[i].second, bytes[i]));
  }
  memory.slots.insert(memory.slots.end(), out.begin(), out.end());
  std::stable_sort(memory.slots.begin(), memory.slots.end(), [](const Slot& a, const Slot& b) {
    return a.memory.bytes() < b.memory.bytes();
  });
  return out;
}

std::vector<SlotArena::Slot> SlotArena::place(std::span<const SlotSpec> slots) {
  // The largest slots choose first.
  std::vector<size_t> order(slots.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return slots[a].bytes > slots[b].bytes; });
  std::vector<Slot> out(slots.size());
  std::map<Space, std::vector<bool>> in_use;
  std::map<Space, std::vector<size_t>> missing;
  for (const size_t i : order) {
    const Space space = Space::of(slots[i]);
    const Memory& memory = spaces_[space];
    in_use[space].resize(memory.slots.size());
    const auto found = memory.find(slots[i].bytes, in_use[space]);
    if (!found) {
      missing[space].push_back(i);
      continue;
    }
    in_use[space][*found] = true;
    out[i] = memory.slots[*found];
    out[i].memory = out[i].memory.slice(0, 0, slots[i].bytes);
  }
  for (const auto& [space, items] : missing) {
    std::vector<int64_t> bytes;
    for (const size_t i : items) bytes.push_back(slots[i].bytes);
    const std::vector<Slot> added = add_slots(space, bytes);
    for (size_t k = 0; k < items.size(); ++k) out[items[k]] = added[k];
  }
  return out;
}

SlotArena::Slot SlotArena::demand(Space space, int64_t bytes, std::span<const Slot> apart) {
  std::vector<Slot> taken(apart.begin(), apart.end());
  std::sort(taken.begin(), taken.end(),
            [](const Slot& a, const Slot& b) { return a.offset < b.offset; });
  Memory& memory = spaces_[space];
  for (size_t block = 0; block < memory.blocks.size(); ++block) {
    int64_t offset = 0;
    for (const Slot& t : taken) {
      if (t.block != static_cast<int32_t>(block)) continue;
      if (t.offset - offset >= room(bytes)) break;
      offset = std::max(offset, t.offset + room(t.memory.bytes()));
    }
    if (offset + room(bytes) <= memory.blocks[block].memory.bytes()) {
      return memory.carve(block, offset, bytes);
    }
  }
  return memory.carve(add_block(space, room(bytes)), 0, bytes);
}

int64_t SlotArena::bytes() const {
  int64_t total = 0;
  for (const auto& [space, memory] : spaces_) {
    for (const Block& b : memory.blocks) total += b.memory.bytes();
  }
  return total;
}

}  // namespace moiety::gtp
