// The trim of an owner's experts to its capacity: which of their pairs are kept, and where they go
// (docs/spec/ep.md#plan, rules 2 and 3). It is a function of counts that all ranks know, so all
// come to the same result.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moiety/moe/expert_map.h"

namespace moiety::moe {

struct Trimmed {
  // Indexed by expert of the group: pairs, pairs kept, first slot at the owner.
  std::vector<int64_t> count, kept, offset;
  // Indexed by rank: rows without any drop, pairs dropped.
  std::vector<int64_t> required, dropped;
};
Trimmed trim(const ExpertMap& map, std::vector<int64_t> count, std::span<const int64_t> capacity,
             int64_t alignment);

// Sets kept[e] <= count[e] for the experts of one rank with `capacity` rows in blocks of
// `alignment`: everything is kept if it fits; otherwise blocks are taken from the longest experts
// first.
void trim(std::span<const int64_t> count, int64_t capacity, int64_t alignment,
          std::span<int64_t> kept);

}  // namespace moiety::moe
