#include "moiety/moe/expert_map.h"

#include <algorithm>

#include "moiety/base/error.h"

namespace moiety::moe {
namespace {

std::vector<int32_t> default_owners(int experts, int ranks) {
  std::vector<int32_t> out(std::max(experts, 0));
  for (int r = 0; r < ranks; ++r) {
    const int64_t begin = int64_t{r} * experts / ranks, end = (int64_t{r} + 1) * experts / ranks;
    for (int64_t e = begin; e < end; ++e) out[e] = r;
  }
  return out;
}

}  // namespace

ExpertMap::ExpertMap(int experts, int ranks) : ExpertMap(default_owners(experts, ranks), ranks) {}

ExpertMap::ExpertMap(std::vector<int32_t> owner, int ranks) : owner_(std::move(owner)) {
  MOIETY_CHECK(ranks >= 1, "expert map: {} ranks", ranks);
  MOIETY_CHECK(!owner_.empty() && owner_.size() <= 4096, "expert map: {} experts, at most 4096",
               owner_.size());
  begin_.assign(ranks + 1, 0);
  local_index_.resize(owner_.size());
  for (size_t e = 0; e < owner_.size(); ++e) {
    MOIETY_CHECK(owner_[e] >= 0 && owner_[e] < ranks,
                 "expert map: owner {} of expert {} is outside [0, {})", owner_[e], e, ranks);
    local_index_[e] = begin_[owner_[e] + 1]++;
  }
  for (int r = 0; r < ranks; ++r) begin_[r + 1] += begin_[r];
  by_owner_.resize(owner_.size());
  for (size_t e = 0; e < owner_.size(); ++e) {
    by_owner_[begin_[owner_[e]] + local_index_[e]] = static_cast<int32_t>(e);
  }
}

std::span<const int32_t> ExpertMap::experts_of(int rank) const {
  return {by_owner_.data() + begin_[rank], static_cast<size_t>(local_count(rank))};
}

int ExpertMap::local_max() const {
  int out = 0;
  for (int r = 0; r < ranks(); ++r) out = std::max(out, local_count(r));
  return out;
}

}  // namespace moiety::moe
