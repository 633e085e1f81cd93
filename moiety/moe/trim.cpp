#include "moiety/moe/trim.h"

#include <algorithm>

#include "moiety/moe/exchange.h"

namespace moiety::moe {

void trim(std::span<const int64_t> count, int64_t capacity, int64_t alignment,
          std::span<int64_t> kept) {
  const int64_t blocks = capacity / alignment;
  int64_t most = 0, wanted = 0;
  for (const int64_t c : count) {
    most = std::max(most, ceil_div(c, alignment));
    wanted += ceil_div(c, alignment);
  }
  const auto used = [&](int64_t limit) {
    int64_t sum = 0;
    for (const int64_t c : count) sum += std::min(ceil_div(c, alignment), limit);
    return sum;
  };
  auto [limit, rest] = block_limit(blocks, wanted, most, used);
  for (size_t e = 0; e < count.size(); ++e) {
    int64_t mine = std::min(ceil_div(count[e], alignment), limit);
    if (ceil_div(count[e], alignment) > limit && rest > 0) {
      ++mine;
      --rest;
    }
    kept[e] = std::min(count[e], mine * alignment);
  }
}

Trimmed trim(const ExpertMap& map, std::vector<int64_t> count, std::span<const int64_t> capacity,
             int64_t alignment) {
  const size_t ranks = map.ranks(), experts = map.experts();
  Trimmed out{std::move(count), std::vector<int64_t>(experts), std::vector<int64_t>(experts),
              std::vector<int64_t>(ranks), std::vector<int64_t>(ranks)};
  std::vector<int64_t> local, kept;
  for (size_t r = 0; r < ranks; ++r) {
    const auto mine = map.experts_of(static_cast<int>(r));
    local.resize(mine.size());
    kept.resize(mine.size());
    for (size_t i = 0; i < mine.size(); ++i) local[i] = out.count[mine[i]];
    trim(local, capacity[r], alignment, kept);
    int64_t offset = 0;
    for (size_t i = 0; i < mine.size(); ++i) {
      out.kept[mine[i]] = kept[i];
      out.offset[mine[i]] = offset;
      offset += round_up(kept[i], alignment);
      out.required[r] += round_up(local[i], alignment);
      out.dropped[r] += local[i] - kept[i];
    }
  }
  return out;
}

}  // namespace moiety::moe
