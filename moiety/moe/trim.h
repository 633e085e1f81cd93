// The trim of an owner's experts to its capacity: which of their pairs are kept, and where they go
// (docs/spec/ep.md#plan, rules 2 and 3). It is a function of counts that all ranks know, so all
// come to the same result.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moiety/moe/expert_map.h"
#include "moiety/moe/peers/primitives.h"

namespace moiety::moe {

struct Trimmed {
  // Indexed by expert of the group: pairs, pairs kept, first slot at the owner.
  std::vector<int64_t> count, kept, offset;
  // Indexed by rank: rows without any drop, pairs dropped.
  std::vector<int64_t> required, dropped;
};
Trimmed trim(const ExpertMap& map, std::vector<int64_t> count, std::span<const int64_t> capacity,
             int64_t alignment);

// No expert has more than `limit` blocks, but that the first `rest` of those that want more have one
// more.
struct BlockLimit {
  int64_t limit, rest;
};
// That of experts that want `wanted` blocks together, and at most `most` each, where there are
// `room`; used(limit) is what they take if none has more than `limit`.
template <class Used>
MOIETY_STEP BlockLimit block_limit(int64_t room, int64_t wanted, int64_t most, Used&& used) {
  if (wanted <= room) return {most, 0};
  int64_t low = 0;  // used(low) <= room < used(most)
  while (most - low > 1) {
    const int64_t middle = (low + most) / 2;
    (used(middle) <= room ? low : most) = middle;
  }
  return {low, room - used(low)};
}

// Sets kept[e] <= count[e] for the experts of one rank with `capacity` rows in blocks of
// `alignment`: everything is kept if it fits; otherwise blocks are taken from the longest experts
// first.
void trim(std::span<const int64_t> count, int64_t capacity, int64_t alignment,
          std::span<int64_t> kept);

}  // namespace moiety::moe
