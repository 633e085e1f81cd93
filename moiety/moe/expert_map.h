// The owners of a layer's experts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace moiety::moe {

// The owner of every expert. The local index of an expert is its place among its owner's experts,
// in ascending order.
class ExpertMap {
 public:
  // Rank r owns the experts [floor(r E / R), floor((r+1) E / R)); some ranks may own none.
  ExpertMap(int experts, int ranks);
  // owner[e] is in [0, ranks); any order.
  ExpertMap(std::vector<int32_t> owner, int ranks);

  int experts() const { return static_cast<int>(owner_.size()); }
  int ranks() const { return static_cast<int>(begin_.size()) - 1; }
  int owner(int expert) const { return owner_[expert]; }
  int local_index(int expert) const { return local_index_[expert]; }
  // The experts of a rank, ascending; their number; the largest such number of all ranks.
  std::span<const int32_t> experts_of(int rank) const;
  int local_count(int rank) const { return begin_[rank + 1] - begin_[rank]; }
  int local_max() const;

 private:
  std::vector<int32_t> owner_;        // [E]
  std::vector<int32_t> local_index_;  // [E]
  std::vector<int32_t> by_owner_;     // [E] experts, by (owner, expert)
  std::vector<int32_t> begin_;        // [R + 1] into by_owner_
};

}  // namespace moiety::moe
