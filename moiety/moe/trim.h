// What an owner's capacity leaves of its experts' pairs, and where they go (docs/spec/ep.md#plan,
// rules 2 and 3). A function of counts that all ranks know, so all come to the same result.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moiety/moe/expert_map.h"

namespace moiety::moe {

struct Trimmed {
  // By expert of the group: pairs, pairs kept, first slot at the owner.
  std::vector<int64_t> count, kept, offset;
  // By rank: rows without any drop, pairs dropped.
  std::vector<int64_t> required, dropped;
};
Trimmed trim(const ExpertMap& map, std::vector<int64_t> count, std::span<const int64_t> capacity,
             int64_t alignment);

// kept[e] <= count[e] for the experts of one rank with `capacity` rows in blocks of `alignment`:
// everything if it fits; else blocks are taken from the longest experts first.
void trim(std::span<const int64_t> count, int64_t capacity, int64_t alignment,
          std::span<int64_t> kept);

}  // namespace moiety::moe
